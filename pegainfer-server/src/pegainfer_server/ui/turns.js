// How one turn of the conversation looks: a user's message, an assistant's answer as it comes, a tool's result.

import { count, make, plural, rate, seconds } from "./dom.js";
import { GrowingText, copyButton } from "./markup.js";

const ENDINGS = {
  length: "cut off at the token limit",
  abort: "aborted by the server",
  content_filter: "stopped by a content filter",
};

/** A message of the user, or a tool's result. */
export function plainTurn(role, title, text) {
  return make("article", { class: `turn ${role}` }, make("h3", {}, title), make("div", { class: "text" }, make("p", {}, text)));
}

/** An assistant's answer. `add` takes the chunks of its stream. */
export class Answer {
  constructor(model, { onRetry, onResults }) {
    this.content = "";
    this.reasoning = "";
    this.calls = []; // {id, name, arguments}
    this.finish = null;
    this.failed = false;
    this.stopped = false;
    this.done = false;
    this._usage = null;
    this._sent = performance.now();
    this._first = null;
    this._last = null;
    this._firstTokens = 0;
    this._thought = null; // when thinking ended
    this._folded = false; // the thoughts, once the answer proper begins
    this._frame = 0;
    this._onResults = onResults;
    this._build(model, onRetry);
  }

  _build(model, onRetry) {
    this._thinkingTitle = make("summary", {}, "Thinking");
    const thinkingText = make("div", { class: "text" });
    this._thinking = make("details", { class: "reasoning", hidden: true, open: true }, this._thinkingTitle, thinkingText);
    this._text = make("div", { class: "text" });
    this._calls = make("div", { class: "calls" });
    this._problem = make("div", { class: "problem", role: "alert", hidden: true });
    this._figures = make("ul", { class: "figures", "aria-label": "Figures of this answer" });
    this._copy = copyButton(() => this.content);
    this._retry = make("button", { type: "button", class: "quiet", onclick: onRetry }, "Retry");
    this._actions = make("div", { class: "actions", hidden: true }, this._copy, this._retry);
    this._waiting = make("p", { class: "waiting" }, make("span", { class: "unseen" }, "waiting for the first token"));
    this._thinkingView = new GrowingText(thinkingText);
    this._textView = new GrowingText(this._text);
    this.element = make(
      "article", { class: "turn assistant", "aria-busy": "true" }, make("h3", {}, model), this._thinking, this._text,
      this._calls, this._waiting, this._problem, make("footer", {}, this._figures, this._actions),
    );
  }

  /** Take one chunk of the stream. */
  add(chunk) {
    if (chunk.usage) this._usage = chunk.usage;
    for (const choice of chunk.choices) {
      const { delta } = choice;
      const thought = delta.reasoning_content ?? delta.reasoning ?? "";
      if (thought || delta.content || delta.tool_calls?.length) this._mark();
      this.reasoning += thought;
      if (delta.content || delta.tool_calls?.length) this._thought ??= performance.now();
      this.content += delta.content ?? "";
      for (const call of delta.tool_calls ?? []) this._addCall(call);
      this.finish = choice.finish_reason ?? this.finish;
    }
    this._frame ||= requestAnimationFrame(() => this._draw());
  }

  /** The stream is over: complete, stopped by the user, or failed. */
  end({ stopped = false, failure = null } = {}) {
    cancelAnimationFrame(this._frame);
    this.done = true;
    this.stopped = stopped;
    this.failed = failure !== null;
    if (failure) this._showFailure(failure);
    this._draw();
    this._waiting.remove();
    this.element.setAttribute("aria-busy", "false");
    this._actions.hidden = false;
    this._copy.hidden = !this.content;
    if (this.finish === "tool_calls" && !failure) this._askForResults();
  }

  /** Only the newest answer can be made again, or get results for its calls. */
  freeze() {
    this._retry.remove();
    this.element.querySelectorAll(".call textarea, .calls + button").forEach((field) => field.remove());
  }

  /** As a message of a request; null if it has nothing to say. */
  message() {
    if (!this.content && !this.calls.length) return null;
    const message = { role: "assistant", content: this.content || null };
    if (!this.calls.length) return message;
    message.tool_calls = this.calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
    // models that call tools while they think expect their thoughts back
    if (this.reasoning) message.reasoning_content = this.reasoning;
    return message;
  }

  /** One sentence for screen readers. */
  summary() {
    if (this.failed) return "The answer failed.";
    const tokens = this._usage ? `, ${plural(this._usage.completion_tokens, "token")}` : "";
    return this.stopped ? `Stopped${tokens}.` : `Answer complete${tokens}.`;
  }

  _mark() {
    this._last = performance.now();
    if (this._first === null) {
      this._first = this._last;
      this._firstTokens = this._usage?.completion_tokens ?? 1;
    }
  }

  _addCall(part) {
    const call = (this.calls[part.index] ??= { id: "", name: "", arguments: "" });
    call.id ||= part.id ?? "";
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }

  _draw() {
    this._frame = 0;
    if (this._first !== null) this._waiting.remove();
    if (this.reasoning) this._drawThinking();
    this._textView.set(this.content);
    this.calls.forEach((call, index) => this._drawCall(call, index));
    this._figures.replaceChildren(...this._facts().map((fact) => make("li", {}, fact)));
    this.element.dispatchEvent(new CustomEvent("grown", { bubbles: true }));
  }

  _drawThinking() {
    this._thinking.hidden = false;
    this._thinkingView.set(this.reasoning);
    const ended = this._thought ?? (this.done ? this._last : null);
    this._thinkingTitle.textContent = ended === null ? "Thinking" : `Thought for ${seconds(ended - this._first)}`;
    if (this._thought !== null && !this._folded) {
      this._folded = true; // only once: whoever opens it again wants to read it
      this._thinking.open = false;
    }
  }

  _drawCall(call, index) {
    let card = this._calls.children[index];
    if (!card) {
      card = make("section", { class: "call" }, make("h4", {}), make("pre", { tabindex: "0", "aria-label": "arguments" }));
      this._calls.append(card);
    }
    const [title, body] = card.children;
    if (title.firstChild?.textContent !== `Calls ${call.name}`) {
      title.replaceChildren(`Calls ${call.name}`, make("code", {}, call.id));
    }
    body.textContent = this.done ? indented(call.arguments) : call.arguments;
  }

  _askForResults() {
    const boxes = this.calls.map((call) => make("textarea", { rows: "2", class: "code", "aria-label": `Result of ${call.name}`, placeholder: "Result of this call" }));
    [...this._calls.children].forEach((card, index) => card.append(boxes[index]));
    const button = make("button", { type: "button", class: "primary", onclick: submit }, this.calls.length > 1 ? "Send results" : "Send result");
    this._calls.after(button);
    const onResults = this._onResults;
    const calls = this.calls;
    function submit() {
      onResults(calls.map((call, index) => ({ call, text: boxes[index].value })));
    }
  }

  _facts() {
    const facts = [];
    const usage = this._usage;
    if (usage) {
      const cached = usage.prompt_tokens_details?.cached_tokens;
      facts.push(`${plural(usage.prompt_tokens, "prompt token")}${cached ? ` (${count(cached)} cached)` : ""}`);
      const thought = usage.completion_tokens_details?.reasoning_tokens;
      facts.push(`${plural(usage.completion_tokens, "token")}${thought ? ` (${count(thought)} thinking)` : ""}`);
    }
    if (this._first !== null) facts.push(`first after ${seconds(this._first - this._sent)}`);
    const later = (usage?.completion_tokens ?? 0) - this._firstTokens;
    if (later > 0 && this._last > this._first) facts.push(`${rate((1000 * later) / (this._last - this._first))} tokens/s`);
    if (this.stopped) facts.push("stopped by you");
    else if (ENDINGS[this.finish]) facts.push(ENDINGS[this.finish]);
    return facts;
  }

  _showFailure(failure) {
    const facts = Object.entries(failure.facts ?? {}).filter(([, value]) => value);
    this._problem.hidden = false;
    this._problem.append(make("p", {}, make("strong", {}, "Error: "), failure.message));
    if (facts.length) this._problem.append(make("p", { class: "note" }, facts.map(([name, value]) => `${name}: ${value}`).join(" \u00b7 ")));
  }
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // shown as the model wrote it
  }
}
