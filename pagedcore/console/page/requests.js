// The tab "Requests": a list to search, and one request with its timeline and its cache explanation.

import { getJson } from "./client.js";
import { byId, el, setFacts, swatch } from "./dom.js";
import { NOTHING, ago, count, millis, percent, waitFor } from "./format.js";
import { REASONS } from "./now.js";

const LIMIT = 100;

const PHASES = { queue: "b6", prefill: "b1", decode: "b2", preempted: "b3" };

const PARTS = {
  live: ["b2", "shared with a running request"], pool: ["b1", "from the pool"], host: ["b4", "from host memory"],
  evicted: ["b3", REASONS.evicted], diverged: ["b5", REASONS.diverged], short: ["b5", REASONS.short], cold: ["b6", REASONS.cold],
  hole: ["b7", REASONS.hole], in_flight: ["b4", REASONS.in_flight], isolated: ["b7", REASONS.isolated], disabled: ["b6", REASONS.disabled],
};

/** Owns the list and the search. `refresh` asks anew; nothing asks by itself. */
export class Requests {
  constructor(onError) {
    this.onError = onError;
    this.asked = 0;
    this.rows = new Map();
    byId("search-form").addEventListener("submit", (event) => { event.preventDefault(); this.refresh(); });
    byId("search").addEventListener("input", () => this.refresh());
    byId("request-rows").addEventListener("click", (event) => {
      const row = event.target.closest("tr[data-id]");
      if (row !== null) this.open(row.dataset.id);
    });
    byId("detail-close").addEventListener("click", () => byId("detail").close());
    byId("detail").addEventListener("click", (event) => { if (event.target === byId("detail")) byId("detail").close(); });
  }

  async refresh() {
    const turn = this.asked += 1;
    const search = byId("search").value.trim();
    try {
      const { data } = await getJson(`v1/requests?limit=${LIMIT}&search=${encodeURIComponent(search)}`);
      if (turn === this.asked) this.draw(data, search);
    } catch (error) {
      this.onError(error);
    }
  }

  draw(records, search) {
    this.placeRows(records);
    byId("requests-empty").hidden = records.length > 0 || search !== "";
    byId("requests-table").hidden = records.length === 0;
    const shown = records.length === LIMIT ? `The newest ${LIMIT}` : `${records.length}`;
    byId("requests-count").textContent = records.length || search ? `${shown} ${records.length === 1 ? "request" : "requests"}${search ? " found" : ""}` : "";
  }

  /** Rows that are the same stay the same elements, so that a click or the focus is never lost to a refresh. */
  placeRows(records) {
    const before = this.rows, body = byId("request-rows");
    this.rows = new Map();
    for (const record of records) {
      const { age_s: age, ...facts } = record;
      const key = JSON.stringify(facts);
      let name = `${record.engine} ${record.request_id}`;
      while (this.rows.has(name)) name += "+"; // an id that was used again
      const known = before.get(name);
      const row = known?.key === key ? known.row : rowOf(record);
      row.lastElementChild.textContent = ago(age);
      this.rows.set(name, { key, row });
    }
    [...this.rows.values()].forEach(({ row }, index) => {
      if (body.children[index] !== row) body.insertBefore(row, body.children[index] ?? null);
    });
    while (body.children.length > this.rows.size) body.lastElementChild.remove();
  }

  async open(id) {
    try {
      const found = await getJson(`ui/request/${encodeURIComponent(id)}`);
      byId("detail-title").textContent = id;
      byId("detail-body").replaceChildren(...detail(found.request, found.explanation));
      if (!byId("detail").open) byId("detail").showModal();
      byId("detail").scrollTop = 0;
    } catch (error) {
      this.onError(error);
    }
  }
}

function rowOf(record) {
  const cached = Object.values(record.cached_tokens).reduce((sum, tokens) => sum + tokens, 0);
  const share = Object.keys(record.cached_tokens).length === 0 ? NOTHING : percent(cached / record.prompt_tokens);
  const who = [record.tenant, record.class].filter((part) => part !== null).join(" · ");
  return el("tr", { "data-id": record.request_id },
    el("td", {}, el("button", { type: "button", class: "link", title: record.request_id }, record.request_id), who ? el("span", { class: "sub" }, who) : null),
    el("td", {}, chip(record)),
    cell("Prompt", count(record.prompt_tokens)),
    cell("From cache", share),
    cell("Output", count(atEnd(record, record.completion_tokens))),
    cell("First token", millis(record.ttft_ms)),
    cell("Total", millis(record.e2e_ms)),
    cell("Arrived", ago(record.age_s)));
}

function cell(label, text) {
  return el("td", { class: "num", "data-label": label }, text);
}

/** What is counted when a request ends; null before. */
function atEnd(record, value) {
  return record.e2e_ms === null ? null : value;
}

function chip(record) {
  const ending = record.finish_reason ?? record.reject_reason;
  return el("span", { class: `chip ${record.status}` }, ending ? `${record.status}, ${ending}` : record.status);
}

function detail(record, explanation) {
  const facts = el("dl", { class: "facts" });
  setFacts(facts, [
    ["Status", chip(record)],
    ["Tenant", record.tenant ?? NOTHING],
    ["Prompt tokens", count(record.prompt_tokens)],
    ["Output tokens", count(atEnd(record, record.completion_tokens))],
    ["In queue", millis(record.time_in_queue_ms)],
    ["First token", millis(record.ttft_ms)],
    ["Per output token", millis(record.decode_latency_ms_per_token)],
    ["Total", millis(record.e2e_ms)],
    ["KV blocks", count(atEnd(record, record.kv_cache_pages_allocated))],
    ["Preemptions", count(record.preemptions)],
    ["Trace", record.trace_id ?? NOTHING],
  ]);
  return [facts, ...timeline(record), ...cache(explanation)];
}

// ---- timeline

function timeline(record) {
  const phases = phasesOf(record);
  const total = phases.reduce((sum, phase) => sum + phase.ms, 0);
  const parts = [el("h3", {}, "Timeline")];
  if (total > 0) {
    parts.push(strip(phases.map((phase) => [phase.ms / total, PHASES[phase.name]]), phases.map((phase) => `${phase.name} ${millis(phase.ms)}`).join(", ")));
    parts.push(el("ul", { class: "legend" }, ...sums(phases).map(([name, ms]) => el("li", {}, swatch(PHASES[name]), el("span", {}, name, " ", el("b", {}, millis(ms)))))));
  }
  const waits = Object.entries(record.waiting_reason_ms).filter(([, ms]) => ms >= 1);
  if (record.e2e_ms !== null) parts.push(el("p", { class: "hint sentences" }, `The engine was done after ${millis(record.e2e_ms)}. What a client waited beyond that is transport: the way, a proxy that holds replies back, or a client that reads slowly. The engine waits for no reader.`));
  if (waits.length > 0) parts.push(el("p", { class: "hint sentences" }, `Waited for ${waits.map(([reason, ms]) => `${waitFor(reason)} ${millis(ms)}`).join(", ")}.`));
  parts.push(el("ol", { class: "events" }, ...record.events.map((event) => el("li", {}, el("span", { class: "t" }, millis(event.t_ms)), el("span", {}, event.name.replaceAll("_", " "), factsOf(event))))));
  if (record.num_events_left_out > 0) parts.push(el("p", { class: "hint" }, `${count(record.num_events_left_out)} more events were not kept.`));
  return parts;
}

function factsOf({ name, t_ms, ...facts }) {
  const shown = Object.entries(facts).filter(([, value]) => value !== null).map(([fact, value]) =>
    `${fact.replace(/^num_/, "").replaceAll("_", " ")} ${typeof value !== "number" ? value : fact.startsWith("usage") ? percent(value) : count(value)}`);
  return shown.length === 0 ? null : el("small", {}, shown.join(", "));
}

/** Stretches without a gap, to the end or to now: queue, prefill, decode, and the times after a preemption. */
function phasesOf(record) {
  const phases = [];
  let name = "queue", from = 0, hasToken = false;
  for (const event of record.events) {
    if (event.name === "first_token") hasToken = true;
    const next = { admitted: "prefill", first_token: "decode", preempted: "preempted", resumed: hasToken ? "decode" : "prefill", finished: "end" }[event.name];
    if (next === undefined) continue;
    if (event.t_ms > from) phases.push({ name, ms: event.t_ms - from });
    [name, from] = [next, event.t_ms];
  }
  if (name !== "end") phases.push({ name, ms: record.age_s * 1000 - from });
  return phases;
}

function sums(phases) {
  const found = new Map();
  for (const { name, ms } of phases) found.set(name, (found.get(name) ?? 0) + ms);
  return [...found];
}

// ---- cache

function cache(explanation) {
  const parts = [el("h3", {}, "Prefix cache")];
  if (explanation === null) return [...parts, el("p", { class: "hint" }, "No lookup of this request is known: it has not been admitted, or shares that of another choice.")];
  const blocks = partsOf(explanation);
  const total = blocks.reduce((sum, [, tokens]) => sum + tokens, 0);
  if (total > 0) {
    parts.push(strip(blocks.map(([name, tokens]) => [tokens / total, PARTS[name]?.[0] ?? "b6"]), blocks.map(([name, tokens]) => `${name} ${tokens} tokens`).join(", ")));
    const names = [...new Set(blocks.map(([name]) => name))];
    parts.push(el("ul", { class: "legend" }, ...names.map((name) => el("li", {}, swatch(PARTS[name]?.[0] ?? "b6"), el("span", {}, el("b", {}, name.replaceAll("_", " ")), ` ${PARTS[name]?.[1] ?? ""}`)))));
  }
  parts.push(el("ul", { class: "sentences prose" }, ...explanation.sentences.map((sentence) => el("li", {}, sentence))));
  const leaves = explanation.first_divergence;
  if (leaves?.text_before !== undefined) parts.push(el("p", { class: "excerpt" }, "…", leaves.text_before, el("mark", {}, leaves.text_after), "…"));
  else if (explanation.prompt_head !== undefined) parts.push(el("p", { class: "excerpt" }, explanation.prompt_head, "…"));
  return parts;
}

/** [name, tokens] from the first eligible block to the last. */
function partsOf(explanation) {
  const served = ["live", "pool", "host"].map((source) => [source, explanation.tokens[source]]);
  const missed = explanation.missed_blocks.map((run) => [run.reason, run.last_token - run.first_token + 1]);
  return [...served, ...missed].filter(([, tokens]) => tokens > 0);
}

function strip(parts, label) {
  return el("div", { class: "strip", role: "img", "aria-label": label }, ...parts.map(([share, colour]) => {
    const part = el("span", { class: colour });
    part.style.flex = `${Math.max(share, 0.001)} 1 0`;
    return part;
  }));
}

