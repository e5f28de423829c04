// "What to change": what stands out this second, and the advice on the cache, which is asked for now and then.

import { getJson } from "./client.js";
import { byId, el } from "./dom.js";

const MIN_LOOKUPS = 16; // of fewer prompts the advice concludes nothing

/** Owns the latest advice of each engine. */
export class WhatToChange {
  constructor(onError) {
    this.onError = onError;
    this.advice = new Map();
  }

  async refresh() {
    try {
      const { data } = await getJson("v1/cache/advice");
      this.advice = new Map(data.map((one) => [one.engine, one.num_lookups < MIN_LOOKUPS ? [] : one.sentences]));
    } catch (error) {
      this.onError(error);
    }
  }

  draw(stats) {
    const parts = [
      ...stats.findings.map((sentence) => el("li", { class: "finding" }, sentence)),
      ...(this.advice.get(stats.engine) ?? []).map((sentence) => el("li", {}, sentence)),
    ];
    byId("change").hidden = parts.length === 0;
    const list = byId("change-list"), text = parts.map((part) => part.textContent).join();
    if (list.dataset.text === text) return; // a text that is being selected or read out stays
    list.dataset.text = text;
    list.replaceChildren(...parts);
  }
}
