// The settings form as fields of a request. A field that is left empty is not sent: the server's default holds.

import { byId, memory } from "./dom.js";

const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed",
  "presence_penalty", "frequency_penalty", "repetition_penalty",
];
const form = byId("settings");
const text = (name) => form.elements[name].value;

function parsedTools() {
  const field = form.elements.tools;
  field.setCustomValidity("");
  if (!field.value.trim()) return null;
  try {
    const tools = JSON.parse(field.value);
    if (!Array.isArray(tools)) throw new Error("it is no list");
    return tools.length ? tools : null;
  } catch (error) {
    field.setCustomValidity(`Tools must be a JSON list: ${error.message}`);
    return null;
  }
}

/** Whether every field can be sent; if not, `reveal` is called and the first wrong one says why. */
export function valid(reveal) {
  parsedTools();
  if (form.checkValidity()) return true;
  reveal();
  form.reportValidity();
  return false;
}

/** Fields of a chat request. */
export function fields() {
  const chosen = {};
  for (const name of NUMBERS) if (text(name) !== "") chosen[name] = Number(text(name));
  const stop = text("stop").split("\n").filter((line) => line);
  if (stop.length) chosen.stop = stop;
  if (text("thinking")) chosen.chat_template_kwargs = { enable_thinking: text("thinking") === "on" };
  const tools = parsedTools();
  if (tools) chosen.tools = tools;
  return chosen;
}

export const systemPrompt = () => text("system").trim();

function save() {
  const values = [...form.elements].filter((field) => field.name).map((field) => [field.name, field.value]);
  memory.set("settings", JSON.stringify(Object.fromEntries(values)));
}

/** Bring back what this tab remembers, and remember what changes. */
export function start() {
  const saved = JSON.parse(memory.get("settings") || "{}");
  for (const [name, value] of Object.entries(saved)) if (form.elements[name]) form.elements[name].value = value;
  form.addEventListener("input", () => {
    parsedTools();
    save();
  });
  form.addEventListener("reset", () => setTimeout(save));
  form.addEventListener("submit", (event) => event.preventDefault());
}
