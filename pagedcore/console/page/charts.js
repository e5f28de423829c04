// Charts as SVG.

import { el, svg } from "./dom.js";

/** Lines over the last `span` seconds; the newest value is at the right edge. `series` is a list of {name, values, format}. */
export class TimeChart {
  constructor(holder, { height = 120, span = 120 }) {
    this.holder = holder;
    this.height = height;
    this.span = span;
    this.tip = el("div", { class: "tip", hidden: true });
    this.pointer = null;
    holder.addEventListener("pointermove", (event) => { this.pointer = event.clientX; this.showTip(); });
    holder.addEventListener("pointerleave", () => { this.pointer = null; this.showTip(); });
  }

  draw(series, label) {
    this.series = series;
    this.width = Math.max(this.holder.clientWidth, 240);
    const top = niceMax(Math.max(...series.flatMap((one) => one.values), 0));
    this.x = (index, length) => this.width - 4 - ((length - 1 - index) * (this.width - 44)) / (this.span - 1);
    const y = (value) => this.height - 18 - (value / top) * (this.height - 30);
    const root = svg("svg", { viewBox: `0 0 ${this.width} ${this.height}`, role: "img", "aria-label": label });
    for (const part of [0, 0.5, 1]) {
      const at = y(part * top);
      root.append(svg("line", { class: part === 0 ? "axis" : "grid-line", x1: 40, x2: this.width - 4, y1: at, y2: at }));
      root.append(svg("text", { x: 34, y: at + 4, "text-anchor": "end" }, short(part * top)));
    }
    root.append(svg("text", { x: 40, y: this.height - 3 }, `${this.span} s ago`));
    root.append(svg("text", { x: this.width - 4, y: this.height - 3, "text-anchor": "end" }, "now"));
    series.forEach((one, number) => root.append(...this.lineOf(one.values, number + 1, y, number === 0)));
    this.cross = svg("line", { class: "cross", y1: 10, y2: this.height - 18, visibility: "hidden" });
    root.append(this.cross);
    this.holder.replaceChildren(root, this.tip);
    this.showTip();
  }

  lineOf(values, number, y, hasArea) {
    if (values.length === 0) return [];
    const points = values.map((value, index) => `${this.x(index, values.length).toFixed(1)},${y(value).toFixed(1)}`);
    const last = values.length - 1;
    const parts = [
      svg("polyline", { class: `line k${number}`, points: points.join(" ") }),
      svg("circle", { class: `f${number}`, cx: this.x(last, values.length), cy: y(values[last]), r: 3.5 }),
    ];
    if (hasArea && values.length > 1) {
      const floor = y(0).toFixed(1);
      const area = `${this.x(0, values.length).toFixed(1)},${floor} ${points.join(" ")} ${this.x(last, values.length).toFixed(1)},${floor}`;
      parts.unshift(svg("polygon", { class: `area f${number}`, points: area }));
    }
    return parts;
  }

  showTip() {
    const length = this.series?.[0].values.length ?? 0;
    const box = this.holder.getBoundingClientRect();
    const isShown = this.pointer !== null && length > 0;
    this.tip.hidden = !isShown;
    this.cross?.setAttribute("visibility", isShown ? "visible" : "hidden");
    if (!isShown) return;
    const at = ((this.pointer - box.left) / box.width) * this.width;
    const step = (this.width - 44) / (this.span - 1);
    const back = Math.min(Math.max(Math.round((this.width - 4 - at) / step), 0), length - 1);
    const index = length - 1 - back;
    const x = this.x(index, length);
    this.cross.setAttribute("x1", x);
    this.cross.setAttribute("x2", x);
    this.tip.textContent = [...this.series.map((one) => `${one.format(one.values[index])} ${one.name}`), back === 0 ? "now" : `${back} s ago`].join("  ·  ");
    this.tip.style.left = `${Math.min(Math.max((x / this.width) * box.width, 60), box.width - 60)}px`;
  }
}

/** Hit rate over the size of the pool, one line a block size. `here` is the setting that runs. */
export function missRatioCurve(curve, here, ideal, width) {
  const height = 300, left = 44, right = 96, top = 14, bottom = 40;
  const factors = [...new Set(curve.map((point) => point.pool_factor))].sort((a, b) => a - b);
  const sizes = [...new Set(curve.map((point) => point.block_size))].sort((a, b) => a - b);
  const low = Math.log2(factors[0]), high = Math.log2(factors[factors.length - 1]);
  const x = (factor) => left + ((Math.log2(factor) - low) / (high - low || 1)) * (width - left - right);
  const y = (value) => height - bottom - value * (height - top - bottom);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Hit rate over the size of the KV pool, by block size; the table below holds the same numbers" });
  for (const value of [0, 0.25, 0.5, 0.75, 1]) {
    root.append(svg("line", { class: value === 0 ? "axis" : "grid-line", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    root.append(svg("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, `${value * 100} %`));
  }
  for (const factor of factors) root.append(svg("text", { x: x(factor), y: height - bottom + 18, "text-anchor": "middle" }, `${factor}×`));
  root.append(svg("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, "size of the pool, against the one that runs"));
  const labels = [];
  sizes.forEach((size, number) => {
    const points = curve.filter((point) => point.block_size === size).sort((a, b) => a.pool_factor - b.pool_factor);
    root.append(svg("polyline", { class: `line k${number + 1}`, points: points.map((point) => `${x(point.pool_factor)},${y(point.hit_rate)}`).join(" ") }));
    for (const point of points) {
      const dot = svg("circle", { class: `f${number + 1}`, cx: x(point.pool_factor), cy: y(point.hit_rate), r: 3.5 });
      dot.append(svg("title", {}, `${point.pool_factor}× pool, block size ${size}: ${(point.hit_rate * 100).toFixed(1)} %`));
      root.append(dot);
    }
    labels.push({ at: y(points[points.length - 1].hit_rate), number, size });
  });
  spread(labels, 15).forEach(({ at, number, size }) => {
    root.append(svg("circle", { class: `f${number + 1}`, cx: width - right + 14, cy: at, r: 4 }));
    root.append(svg("text", { x: width - right + 24, y: at + 4 }, `block ${size}`));
  });
  if (ideal !== null && ideal !== undefined) {
    root.append(svg("line", { class: "cross", x1: left, x2: width - right, y1: y(ideal), y2: y(ideal), "stroke-dasharray": "4 4" }));
    root.append(svg("text", { class: "over", x: left + 6, y: y(ideal) - 8 }, `ideal ${Math.round(ideal * 100)} %`));
  }
  const now = curve.find((point) => point.pool_factor === 1 && point.block_size === here);
  if (now !== undefined) {
    root.append(svg("circle", { cx: x(1), cy: y(now.hit_rate), r: 8, fill: "none", stroke: "currentColor", "stroke-width": 1.5 }));
  }
  return root;
}

/** Labels moved apart to at least `gap`, in their order. */
function spread(labels, gap) {
  const ordered = [...labels].sort((a, b) => a.at - b.at);
  for (let index = 1; index < ordered.length; index += 1) ordered[index].at = Math.max(ordered[index].at, ordered[index - 1].at + gap);
  return ordered;
}

function niceMax(value) {
  if (value <= 4) return 4;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 8, 10].map((step) => step * power).find((step) => step >= value);
}

function short(value) {
  return value >= 10000 ? `${value / 1000}k` : String(value);
}
