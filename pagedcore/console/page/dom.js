// Elements are made here and nowhere else. Text only ever becomes a text node: names of tenants and requests are not markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined).map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

export function setText(id, text) {
  const element = byId(id);
  if (element.textContent !== text) element.textContent = text;
}

/** Definition list of [name, value] pairs. */
export function setFacts(list, pairs) {
  list.replaceChildren(...pairs.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

export function swatch(name) {
  return el("span", { class: `swatch ${name}`, "aria-hidden": "true" });
}
