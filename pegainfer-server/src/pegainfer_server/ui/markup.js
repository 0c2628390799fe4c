// Shows a model's text: fenced code, inline code and bold become elements, everything else stays the text it is.
// Elements are made one by one and filled with text nodes, so nothing in the text can become markup of its own.

import { make } from "./dom.js";

/** Splits a text at lines that begin with three backticks: [{code, language, text}]. An open fence counts as code. */
export function parts(text) {
  const found = [];
  let current = { code: false, language: "", lines: [] };
  const close = () => {
    if (current.code || current.lines.join("").trim()) found.push({ ...current, text: current.lines.join("\n") });
  };
  for (const line of text.split("\n")) {
    const fence = /^\s{0,3}```(.*)$/.exec(line);
    if (fence && (!current.code || !fence[1].trim())) {
      close();
      current = { code: !current.code, language: fence[1].trim(), lines: [] };
    } else current.lines.push(line);
  }
  close();
  return found;
}

function inline(text) {
  const paragraph = make("p");
  for (const piece of text.replace(/^\n+|\s+$/g, "").split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/)) {
    if (/^`.+`$/.test(piece)) paragraph.append(make("code", {}, piece.slice(1, -1)));
    else if (/^\*\*.+\*\*$/.test(piece)) paragraph.append(make("strong", {}, piece.slice(2, -2)));
    else paragraph.append(piece);
  }
  return paragraph;
}

function fenced({ language, text }) {
  const pre = make("pre", { tabindex: "0", "aria-label": language ? `code, ${language}` : "code" }, make("code", {}, text));
  return make("div", { class: "fence" }, make("div", { class: "fence-head" }, language || "code", copyButton(() => text)), pre);
}

/** A button that copies what `text()` gives. */
export function copyButton(text) {
  const button = make("button", { type: "button", class: "quiet", onclick: copy }, "Copy");
  async function copy() {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Cannot copy"; // browsers allow it on localhost and HTTPS only
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  }
  return button;
}

/** Shows a text that grows: parts that did not change keep their elements. */
export class GrowingText {
  constructor(element) {
    this.element = element;
    this.shown = [];
  }

  set(text) {
    const wanted = parts(text);
    wanted.forEach((part, index) => {
      const old = this.shown[index];
      if (old && old.text === part.text && old.code === part.code && old.language === part.language) return;
      const element = part.code ? fenced(part) : inline(part.text);
      if (old) old.element.replaceWith(element);
      else this.element.append(element);
      this.shown[index] = { ...part, element };
    });
    for (const extra of this.shown.splice(wanted.length)) extra.element.remove();
  }
}
