// Puts the page together: buttons, keys, theme, panel, and which models there are.

import { apiKey, request } from "./api.js";
import { Chat } from "./chat.js";
import { byId, count, make, memory } from "./dom.js";
import { Live } from "./live.js";
import * as settings from "./settings.js";

const THEMES = ["auto", "light", "dark"];
const NARROW = window.matchMedia("(max-width: 900px)");

function showTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
}

function startTheme() {
  let theme = memory.get("theme", "localStorage") || "auto";
  showTheme(theme);
  byId("theme").addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    memory.set("theme", theme, "localStorage");
    showTheme(theme);
  });
}

function showPanel(shown) {
  document.body.classList.toggle("panel-shown", shown);
  document.body.classList.toggle("panel-hidden", !shown);
  byId("panel-button").setAttribute("aria-expanded", String(shown));
}

function startPanel() {
  showPanel(!NARROW.matches);
  NARROW.addEventListener("change", () => showPanel(!NARROW.matches));
  byId("panel-button").addEventListener("click", () => showPanel(!document.body.classList.contains("panel-shown")));
}

function askForKey() {
  showPanel(true);
  byId("key-note").textContent = apiKey.get() ? "The server did not take this key." : "This server needs a key.";
  byId("key-note").classList.add("wrong");
  byId("key").focus();
}

function startKey(live) {
  byId("key").value = apiKey.get();
  byId("key-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    apiKey.set(byId("key").value.trim());
    byId("key-note").classList.remove("wrong");
    byId("key-note").textContent = "Kept in this tab until it is closed.";
    if (await live.now()) askForKey();
  });
}

async function showModels(ready) {
  const select = byId("model");
  select.disabled = !ready;
  byId("send").disabled = !ready;
  if (!ready) return;
  const response = await request("v1/models").catch(() => null); // the live view says what is wrong
  if (response === null) return;
  const { data } = await response.json();
  const chosen = select.value;
  select.replaceChildren(...data.map(({ id, max_model_len: length }) => make("option", { value: id, title: length ? `context of ${count(length)} tokens` : null }, id)));
  if (data.some(({ id }) => id === chosen)) select.value = chosen;
}

function startComposer(chat) {
  const prompt = byId("prompt");
  const fit = () => {
    prompt.style.height = "auto";
    prompt.style.height = `${prompt.scrollHeight + 2}px`;
  };
  prompt.addEventListener("input", fit);
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!byId("send").disabled) chat.submit();
  });
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    chat.submit();
  });
  byId("stop").addEventListener("click", () => chat.stop());
  byId("new").addEventListener("click", () => chat.clear());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") chat.stop();
  });
}

startTheme();
startPanel();
settings.start();
const chat = new Chat({ revealSettings: () => showPanel(true), onKeyNeeded: askForKey });
const live = new Live({ onReady: showModels, onKeyNeeded: askForKey });
startComposer(chat);
startKey(live);
byId("send").disabled = true; // until a model is there
live.start();
