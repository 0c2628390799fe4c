// The conversation: what was said, what is being answered, and what a request carries.

import { chatChunks, Failure } from "./api.js";
import { byId } from "./dom.js";
import * as settings from "./settings.js";
import { Answer, plainTurn } from "./turns.js";

const log = byId("log");
const prompt = byId("prompt");
const NEAR_THE_END = 80; // pixels: whoever has scrolled further up is reading

export class Chat {
  /** `revealSettings` shows the settings form; `onKeyNeeded` is called when the server wants a key. */
  constructor({ revealSettings, onKeyNeeded }) {
    this.turns = []; // {message} of users and tools, {answer} of the assistant
    this.stopper = null; // AbortController of the answer that is coming
    this._revealSettings = revealSettings;
    this._onKeyNeeded = onKeyNeeded;
    this._pinned = true; // the end is in view, and stays there while the answer grows
    log.addEventListener("scroll", () => (this._pinned = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_THE_END));
    log.addEventListener("grown", () => this._follow());
  }

  /** Send what is in the message box. */
  submit() {
    const text = prompt.value.trim();
    if (!text || this.stopper || !settings.valid(this._revealSettings)) return;
    prompt.value = "";
    prompt.dispatchEvent(new Event("input"));
    this._say({ role: "user", content: text }, "You");
    this._answer();
  }

  stop() {
    this.stopper?.abort();
  }

  /** Forget everything. */
  clear() {
    this.stop();
    this.turns = [];
    log.replaceChildren(byId("hint") ?? this._hint);
    prompt.focus();
  }

  _say(message, title) {
    this._hint ??= byId("hint");
    this._hint.remove();
    this._freezeLast();
    const element = plainTurn(message.role, title, message.content);
    this.turns.push({ message, element });
    log.append(element);
    this._follow(true);
  }

  _retry(answer) {
    if (this.stopper || !settings.valid(this._revealSettings)) return;
    this.turns.pop();
    answer.element.remove();
    this._answer();
  }

  _takeResults(results) {
    for (const { call, text } of results) this._say({ role: "tool", tool_call_id: call.id, content: text }, `Result of ${call.name}`);
    this._answer();
  }

  _freezeLast() {
    this.turns.at(-1)?.answer?.freeze();
  }

  _request() {
    const system = settings.systemPrompt();
    const said = this.turns.map(({ message, answer }) => message ?? answer.message()).filter((message) => message);
    return {
      model: byId("model").value,
      messages: system ? [{ role: "system", content: system }, ...said] : said,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
      ...settings.fields(),
    };
  }

  async _answer() {
    const body = this._request();
    const answer = new Answer(body.model, { onRetry: () => this._retry(answer), onResults: (results) => this._takeResults(results) });
    const stopper = new AbortController();
    const turns = this.turns;
    turns.push({ answer });
    log.append(answer.element);
    this._follow(true);
    this._busy(stopper);
    byId("announcer").textContent = "Waiting for the answer.";
    try {
      for await (const chunk of chatChunks(body, stopper.signal)) answer.add(chunk);
      answer.end();
    } catch (error) {
      if (error.name === "AbortError") answer.end({ stopped: true });
      else {
        answer.end({ failure: error instanceof Failure ? error : new Failure(`This page failed: ${error.message}`) });
        if (error.status === 401) this._onKeyNeeded();
      }
    }
    if (this.stopper === stopper) this._busy(null);
    if (this.turns === turns) byId("announcer").textContent = answer.summary();
  }

  _busy(stopper) {
    const focused = document.activeElement;
    this.stopper = stopper;
    byId("send").hidden = stopper !== null;
    byId("stop").hidden = stopper === null;
    if (focused === byId("send") || focused === byId("stop")) prompt.focus(); // a hidden button has no focus
  }

  _follow(always = false) {
    if (always || this._pinned) log.scrollTop = log.scrollHeight;
  }
}
