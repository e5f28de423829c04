// The tab "Advice": what another pool or block size would have given the same traffic.

import { missRatioCurve } from "./charts.js";
import { getJson } from "./client.js";
import { byId, el } from "./dom.js";
import { NOTHING, count, percent, seconds } from "./format.js";

export async function refreshAdvice(stats, onError) {
  try {
    const { data } = await getJson("v1/cache/advice");
    byId("advice-body").replaceChildren(...data.map((advice) => adviceOf(advice, data.length > 1, stats)));
  } catch (error) {
    onError(error);
  }
}

function adviceOf(advice, isOneOfMany, stats) {
  const title = isOneOfMany ? `Engine ${advice.engine}` : "What would help";
  const basis = `From ${count(advice.num_lookups)} prompts in ${seconds(advice.window_s)}: hit rate ${percent(advice.hit_rate)}, ideal ${percent(advice.ideal_hit_rate)}.`;
  const parts = [el("article", { class: "card" },
    el("h3", {}, title),
    el("ul", { class: "sentences" }, ...advice.sentences.map((sentence) => el("li", {}, sentence))),
    el("p", { class: "hint sentences" }, basis))];
  if (advice.curve.length > 0) parts.push(curveCard(advice, stats));
  if (advice.costliest_prefixes.length > 0) parts.push(prefixCard(advice.costliest_prefixes));
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

function prefixCard(prefixes) {
  const head = ["Prefix", "Tenant", "Tokens", "Requests", "Computed again"];
  return el("article", { class: "card" },
    el("h3", {}, "Costliest prefixes"),
    el("p", { class: "hint" }, "Those whose tokens were computed again most."),
    el("div", { class: "table-wrap" }, el("table", {},
      el("thead", {}, el("tr", {}, ...head.map((name, index) => el("th", { scope: "col", class: index > 1 ? "num" : null }, name)))),
      el("tbody", {}, ...prefixes.map((prefix) => el("tr", {},
        el("td", { class: "mono", title: prefix.prefix }, prefix.prefix.slice(0, 12)),
        el("td", { class: "name", title: prefix.tenant }, prefix.tenant ?? NOTHING),
        el("td", { class: "num" }, count(prefix.num_tokens)),
        el("td", { class: "num" }, count(prefix.num_requests)),
        el("td", { class: "num" }, `${count(prefix.recomputed_tokens)} tokens`)))))));
}
