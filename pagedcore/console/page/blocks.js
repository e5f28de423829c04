// The KV pool as a map: hue for the state, strength for the heat.

import { byId, el, swatch } from "./dom.js";
import { count } from "./format.js";

const CELL = 11, GAP = 2;

const NAMES = { a: ["active", "a request holds it"], c: ["cached", "kept for a later prompt"], f: ["free", ""] };

export function drawBlocks(map, stats) {
  const canvas = byId("blocks");
  const perRow = Math.max(8, Math.floor((canvas.parentElement.clientWidth - 42 + GAP) / (CELL + GAP)));
  const rows = Math.ceil(map.states.length / perRow);
  const scale = window.devicePixelRatio || 1;
  const width = perRow * (CELL + GAP) - GAP, height = rows * (CELL + GAP) - GAP;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const colours = palette();
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  for (let index = 0; index < map.states.length; index += 1) {
    const state = map.states[index];
    pen.fillStyle = state === "f" ? colours.free : colours[state + map.heat[index]];
    pen.beginPath();
    pen.roundRect((index % perRow) * (CELL + GAP), Math.floor(index / perRow) * (CELL + GAP), CELL, CELL, 2.5);
    pen.fill();
  }
  const { num_active_blocks: active, num_cached_blocks: cached, num_free_blocks: free } = stats;
  canvas.setAttribute("aria-label", `${active} active, ${cached} cached and ${free} free of ${map.num_blocks} blocks`);
  const each = map.blocks_per_cell === 1 ? "Each square is a block" : `One block of every ${map.blocks_per_cell} is drawn, each`;
  byId("blocks-hint").textContent = `${each} of ${stats.block_size} tokens; the stronger its colour, the more recently it was used.`;
  drawLegend({ a: active, c: cached, f: free });
}

function drawLegend(counts) {
  const items = Object.entries(NAMES).map(([state, [name, meaning]]) => {
    const ramp = state === "f" ? el("span", { class: "ramp" }, swatch("fr")) : el("span", { class: "ramp" }, ...[0, 1, 2, 3, 4].map((heat) => swatch(state + heat)));
    return el("li", {}, ramp, el("span", {}, el("b", {}, count(counts[state])), ` ${name}`, meaning ? `: ${meaning}` : ""));
  });
  byId("blocks-legend").replaceChildren(...items);
}

function palette() {
  const style = getComputedStyle(document.documentElement);
  const names = ["a0", "a1", "a2", "a3", "a4", "c0", "c1", "c2", "c3", "c4", "free"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`)]));
}
