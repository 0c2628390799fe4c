// The live view: /health and /metrics once a second, as long as the page can be seen.

import { Failure, request } from "./api.js";
import { byId, count, percent, rate } from "./dom.js";

const PERIOD = 1000; // ms
const SHOWN = 60; // samples of the chart
const [CHART_WIDTH, CHART_HEIGHT] = [120, 32];

/** Values of a Prometheus text by metric name, one for each series. */
export function parseMetrics(text) {
  const values = new Map();
  for (const line of text.split("\n")) {
    const found = /^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)/.exec(line);
    if (!found) continue;
    if (!values.has(found[1])) values.set(found[1], []);
    values.get(found[1]).push(Number(found[2]));
  }
  return values;
}

export class Live {
  /** `onReady(ready)` is called when the server becomes ready, or is no more; `onKeyNeeded` when it wants a key. */
  constructor({ onReady, onKeyNeeded }) {
    this._onReady = onReady;
    this._onKeyNeeded = onKeyNeeded;
    this._ready = null;
    this._before = null; // {time, output, prompt} of the last sample
    this._rates = [];
    this._keyNeeded = false;
  }

  start() {
    this._loop();
    document.addEventListener("visibilitychange", () => !document.hidden && this.now());
  }

  /** Look at once, for instance with a new key; whether that one is refused too. */
  async now() {
    await this._look();
    return this._keyNeeded;
  }

  async _loop() {
    for (;;) {
      if (!document.hidden) await this._look();
      await new Promise((resolve) => setTimeout(resolve, PERIOD));
    }
  }

  async _look() {
    const state = await health();
    const note = byId("live-note");
    try {
      const metrics = parseMetrics(await (await request("metrics")).text());
      this._show(metrics);
      this._setKeyNeeded(false);
      note.hidden = true;
    } catch (error) {
      this._before = null;
      this._setKeyNeeded(error.status === 401);
      note.textContent = error instanceof Failure ? error.message : `This page failed: ${error.message}`;
      note.hidden = false;
    }
    if (this._keyNeeded && state.name === "ok") showHealth({ name: "key", text: "API key needed" });
    else showHealth(state);
    const ready = state.name === "ok" && !this._keyNeeded;
    if (ready !== this._ready) {
      this._ready = ready;
      this._onReady(ready);
    }
  }

  _setKeyNeeded(needed) {
    if (needed && !this._keyNeeded) this._onKeyNeeded();
    this._keyNeeded = needed;
  }

  _show(metrics) {
    const total = (name) => metrics.get(name)?.reduce((sum, value) => sum + value, 0);
    const running = total("vllm:num_requests_running");
    if (running === undefined) return; // the engine is not ready
    byId("running").textContent = count(running);
    byId("waiting").textContent = count(total("vllm:num_requests_waiting"));
    const usage = metrics.get("vllm:kv_cache_usage_perc");
    this._share("kv", usage.reduce((sum, value) => sum + value, 0) / usage.length);
    const queries = total("vllm:prefix_cache_queries_total");
    if (queries === undefined) byId("hits").textContent = "cache is off";
    else if (queries) this._share("hits", total("vllm:prefix_cache_hits_total") / queries);
    this._showRates(total("vllm:generation_tokens_total"), total("vllm:prompt_tokens_total"));
  }

  _share(name, share) {
    byId(name).textContent = percent(share);
    byId(`${name}-meter`).value = share;
  }

  _showRates(output, prompt) {
    const now = { time: performance.now(), output, prompt };
    const before = this._before;
    this._before = now;
    if (!before || output < before.output) return; // the first sample, or a server that began anew
    const passed = (now.time - before.time) / 1000;
    if (passed <= 0) return;
    this._rates = [...this._rates, (output - before.output) / passed].slice(-SHOWN);
    byId("output-rate").textContent = rate(this._rates.at(-1));
    byId("prompt-rate").textContent = rate((prompt - before.prompt) / passed);
    drawChart(this._rates);
  }
}

async function health() {
  try {
    const response = await fetch("health", { cache: "no-store" });
    const body = await response.json();
    if (body.status === "loading") {
      const done = body.total ? ` ${percent(body.done / body.total)}` : "";
      return { name: "loading", text: `loading: ${body.phase}${done}` };
    }
    if (body.status === "dead") return { name: "dead", text: `engine ended: ${body.error}` };
    return { name: body.status, text: body.status === "ok" ? "ready" : body.status };
  } catch {
    return { name: "gone", text: "server cannot be reached" };
  }
}

function showHealth({ name, text }) {
  const badge = byId("health");
  badge.dataset.state = name;
  badge.title = text;
  if (badge.textContent !== text) badge.textContent = text; // a status region speaks when it changes
}

function drawChart(rates) {
  const peak = Math.max(...rates, 1);
  const x = (index) => CHART_WIDTH - (rates.length - 1 - index) * (CHART_WIDTH / (SHOWN - 1));
  const y = (value) => CHART_HEIGHT - 1 - (value / peak) * (CHART_HEIGHT - 3);
  const line = rates.map((value, index) => `${x(index).toFixed(1)},${y(value).toFixed(1)}`);
  const chart = byId("chart");
  chart.querySelector("polyline").setAttribute("points", line.join(" "));
  const ends = [`${x(0).toFixed(1)},${CHART_HEIGHT}`, `${CHART_WIDTH},${CHART_HEIGHT}`];
  chart.querySelector("polygon").setAttribute("points", [ends[0], ...line, ends[1]].join(" "));
  chart.setAttribute("aria-label", `output tokens per second over ${rates.length} seconds: now ${rate(rates.at(-1))}, peak ${rate(Math.max(...rates))}`);
}
