// The tab "Now": what one engine does at this moment.

import { drawBlocks } from "./blocks.js";
import { TimeChart } from "./charts.js";
import { byId, el, setFacts, setText, svg } from "./dom.js";
import { drawTenants } from "./tenants.js";
import { bytes, count, percent, rate, seconds, waitFor } from "./format.js";

const SPAN_S = 120;
const FIGURE_S = 5; // a slow device commits less than one step a second

const VERDICTS = {
  good: ["Good", "M2 6.5 4.8 9 10 3"],
  attention: ["Attention", "M6 2v5M6 9.6v.2"],
  idle: ["Nothing to judge", "M2.5 6h7"],
};

const LEVELS = [
  ["page", "Page", "was the block there?"],
  ["prefix", "Prefix", "prompt tokens not computed"],
  ["pool", "Pool", "blocks taken from the cache"],
];

const REASONS = {
  cold: "never seen",
  diverged: "left the cached prompt inside a block",
  short: "shares less than one block",
  evicted: "dropped to make room",
  in_flight: "being computed by another request",
  hole: "head evicted before its tail",
  isolated: "cached for another tenant or salt",
  disabled: "caching off",
};

/** Owns the last two minutes of each engine. */
export class Now {
  constructor() {
    this.pasts = new Map();
    this.tokens = new TimeChart(byId("tokens-chart"), { span: SPAN_S });
    this.batch = new TimeChart(byId("batch-chart"), { span: SPAN_S });
  }

  /** Remember an event of the feed; cheap, for engines that are not shown too. */
  note(stats) {
    const past = this.pasts.get(stats.engine) ?? { tokens: [], running: [], waiting: [], before: null };
    this.pasts.set(stats.engine, past);
    const before = past.before;
    past.before = stats;
    const elapsed = before === null ? 0 : stats.elapsed_s - before.elapsed_s;
    if (elapsed < 0) past.tokens.length = past.running.length = past.waiting.length = 0; // the engine was started anew
    if (elapsed > 0) push(past.tokens, (stats.sampled_tokens - before.sampled_tokens) / elapsed);
    push(past.running, stats.num_running);
    push(past.waiting, stats.num_waiting);
  }

  draw(stats) {
    const past = this.pasts.get(stats.engine);
    drawIndicators(stats.indicators);
    drawHits(stats);
    drawMisses(stats.miss_blocks);
    this.drawTokens(stats, past);
    this.drawBatch(stats, past);
    drawTenants(stats.tenants);
    if (stats.blocks) drawBlocks(stats.blocks, stats);
  }

  drawTokens(stats, past) {
    const minute = stats.last_minute, now = mean(past.tokens.slice(-FIGURE_S));
    setText("tokens-value", rate(now));
    this.tokens.draw([{ name: "tok/s", values: past.tokens, format: rate }], `Generated tokens a second, now ${rate(now)}`);
    setFacts(byId("tokens-facts"), [
      ["First token p50", seconds(minute.ttft_p50_s)],
      ["First token p99", seconds(minute.ttft_p99_s)],
      ["Between tokens", seconds(minute.token_gap_p50_s)],
      ["Longest gap", seconds(minute.token_gap_max_s)],
      ["Prompt tok/s", rate(minute.prefill_tokens_per_s)],
      ["Generated", count(stats.sampled_tokens)],
    ]);
  }

  drawBatch(stats, past) {
    setText("batch-value", count(stats.num_running));
    setText("queue-value", count(stats.num_waiting));
    const series = [{ name: "running", values: past.running, format: count }, { name: "waiting", values: past.waiting, format: count }];
    this.batch.draw(series, `${stats.num_running} requests run, ${stats.num_waiting} wait`);
    const reasons = Object.entries(stats.num_waiting_by_reason).filter(([, waiting]) => waiting > 0);
    setFacts(byId("batch-facts"), [
      ["Waiting for", reasons.map(([reason, waiting]) => `${waitFor(reason)}: ${waiting}`).join(", ") || "nothing"],
      ["Most at once", count(stats.max_num_seqs)],
      ["Ended in 1 min", count(stats.last_minute.num_ended)],
      ["Preemptions", count(stats.num_preemptions)],
    ]);
  }
}

function drawIndicators(indicators) {
  byId("indicators").replaceChildren(...indicators.map((one) => {
    const [word, path] = VERDICTS[one.verdict];
    const sign = svg("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" }, svg("path", { d: path }));
    return el("li", { class: "indicator" },
      el("span", { class: "label" }, one.name),
      el("span", { class: "value" }, one.shown === "-" ? "–" : one.shown),
      el("span", { class: `verdict ${one.verdict}` }, sign, word),
      el("span", { class: "target" }, `Target ${one.target}`),
      el("span", { class: "note" }, one.note),
      one.next_step ? el("span", { class: "next" }, one.next_step) : null);
  }));
}

function drawHits(stats) {
  const recent = stats.last_minute.hit_rate, ever = stats.hit_rate;
  byId("levels").replaceChildren(...LEVELS.map(([level, name, question]) => {
    const ideal = level === "prefix" ? recent.ideal : null;
    return bar(name, question, recent[level], "b1", ideal, ideal === null ? percent(recent[level]) : `${percent(recent[level])} of ideal ${percent(ideal)}`);
  }));
  setFacts(byId("hit-facts"), [
    ["Since start", percent(ever.prefix)],
    ["Ideal, since start", percent(ever.ideal)],
    ["Tokens saved", count(stats.prefix_cache_hit_tokens)],
    ["KV memory", bytes(stats.device_memory_bytes_by_kind.kv_cache)],
  ]);
}

function drawMisses(misses) {
  const found = Object.entries(misses).filter(([, blocks]) => blocks > 0).sort((a, b) => b[1] - a[1]);
  const total = found.reduce((sum, [, blocks]) => sum + blocks, 0);
  if (total === 0) {
    byId("misses").replaceChildren(el("p", { class: "hint" }, "No block has missed yet."));
    return;
  }
  byId("misses").replaceChildren(...found.map(([reason, blocks]) =>
    bar(reason, REASONS[reason] ?? "", blocks / total, "b3", null, blocks === 1 ? "1 block" : `${count(blocks)} blocks`)));
}

function bar(name, explanation, share, colour, ideal, shown) {
  const fill = el("div", { class: `fill ${colour}` });
  fill.style.width = `${(share ?? 0) * 100}%`;
  const track = el("div", { class: "track", "aria-hidden": "true" }, fill);
  if (ideal !== null && ideal !== undefined) {
    const mark = el("div", { class: "mark" });
    mark.style.left = `${ideal * 100}%`;
    track.append(mark);
  }
  return el("div", { class: "level" },
    el("span", { class: "what" }, name, el("small", {}, explanation)),
    el("span", { class: "rate" }, shown),
    track);
}

function mean(values) {
  return values.length === 0 ? null : values.reduce((sum, value) => sum + value, 0) / values.length;
}

function push(values, value) {
  values.push(value);
  if (values.length > SPAN_S) values.shift();
}

export { REASONS };
