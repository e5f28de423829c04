// The tab "Advice": what another pool or block size would have given the same traffic.

import { missRatioCurve } from "./charts.js";
import { getJson } from "./client.js";
import { byId, el } from "./dom.js";
import { NOTHING, count, percent, seconds } from "./format.js";

/** `openRequest` shows the request of an id. */
export async function refreshAdvice(stats, { onError, openRequest }) {
  try {
    const { data } = await getJson("v1/cache/advice");
    const body = byId("advice-body"), isOpen = [...body.querySelectorAll("details")].map((one) => one.open);
    body.replaceChildren(...data.map((advice) => adviceOf(advice, data.length > 1, stats, openRequest)));
    body.querySelectorAll("details").forEach((one, index) => { one.open = isOpen[index] ?? false; });
  } catch (error) {
    onError(error);
  }
}

function adviceOf(advice, isOneOfMany, stats, openRequest) {
  const title = isOneOfMany ? `Engine ${advice.engine}` : "What would help";
  const basis = `From ${count(advice.num_lookups)} prompts in ${seconds(advice.window_s)}: hit rate ${percent(advice.hit_rate)}, ideal ${percent(advice.ideal_hit_rate)}.`;
  const parts = [el("article", { class: "card" },
    el("h3", {}, title),
    el("ul", { class: "sentences" }, ...advice.sentences.map((sentence) => el("li", {}, sentence))),
    el("p", { class: "hint sentences" }, basis))];
  if (advice.curve.length > 0) parts.push(curveCard(advice, stats));
  if (advice.costliest_prefixes.length > 0) parts.push(prefixCard(advice.costliest_prefixes, openRequest));
  return el("div", { class: "advice-grid" }, ...parts);
}

function curveCard(advice, stats) {
  return el("article", { class: "card" },
    el("h3", {}, "Hit rate by pool size"),
    el("p", { class: "hint" }, `What the same prompts would have found in the cache, for each block size. The ring is what runs: ${percent(advice.hit_rate)}.`),
    el("div", { class: "chart curve" }, missRatioCurve(advice.curve, stats?.block_size, advice.ideal_hit_rate, chartWidth())),
    el("details", {}, el("summary", { class: "hint" }, "The numbers"), curveTable(advice.curve)));
}

function chartWidth() {
  return Math.min(760, Math.max(byId("main").clientWidth - 90, 260));
}

function curveTable(curve) {
  const factors = [...new Set(curve.map((point) => point.pool_factor))].sort((a, b) => a - b);
  const sizes = [...new Set(curve.map((point) => point.block_size))].sort((a, b) => a - b);
  const rateAt = (size, factor) => curve.find((point) => point.block_size === size && point.pool_factor === factor)?.hit_rate;
  return el("div", { class: "table-wrap" }, el("table", {},
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Block size"), ...factors.map((factor) => el("th", { scope: "col", class: "num" }, `${factor}×`)))),
    el("tbody", {}, ...sizes.map((size) => el("tr", {}, el("th", { scope: "row" }, size), ...factors.map((factor) => el("td", { class: "num" }, percent(rateAt(size, factor)))))))));
}

const PREFIX_COLUMNS = ["Prefix", "Tenant", "Tokens", "Requests", "Computed again", "Latest request"];
const NUMBERS = new Set(["Tokens", "Requests", "Computed again"]);

function prefixCard(prefixes, openRequest) {
  return el("article", { class: "card" },
    el("h3", {}, "Costliest prefixes"),
    el("p", { class: "hint" }, "Those whose tokens were computed again most: how many, and the latest request that did so."),
    el("div", { class: "table-wrap" }, el("table", { class: "stacked" },
      el("thead", {}, el("tr", {}, ...PREFIX_COLUMNS.map((name) => el("th", { scope: "col", class: NUMBERS.has(name) ? "num" : null }, name)))),
      el("tbody", {}, ...prefixes.map((prefix) => prefixRow(prefix, openRequest))))));
}

function prefixRow(prefix, openRequest) {
  const latest = el("button", { type: "button", class: "link", title: prefix.latest_request_id }, prefix.latest_request_id);
  latest.addEventListener("click", () => openRequest(prefix.latest_request_id));
  const cells = [
    el("span", { class: "mono", title: prefix.prefix }, prefix.prefix.slice(0, 12)),
    el("span", { title: prefix.tenant }, prefix.tenant ?? NOTHING),
    count(prefix.num_tokens),
    count(prefix.num_requests),
    count(prefix.recomputed_tokens),
    latest,
  ];
  return el("tr", {}, ...PREFIX_COLUMNS.map((name, index) => el("td", { class: NUMBERS.has(name) ? "num" : "cut", "data-label": name }, cells[index])));
}
