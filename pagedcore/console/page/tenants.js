// Whose requests run and wait, and how each tenant fared in the last minute.

import { byId, el } from "./dom.js";
import { count, seconds } from "./format.js";

export function drawTenants(rows) {
  byId("tenants").hidden = rows.every((row) => row.tenant === "");
  byId("tenant-rows").replaceChildren(...rows.map((row) => el("tr", {},
    el("th", { scope: "row", class: "name", title: row.tenant }, row.tenant === "" ? "without a tenant" : row.tenant),
    ...Object.entries({
      Waiting: count(row.num_waiting), Running: count(row.num_running),
      "Prompt tokens": count(row.prompt_tokens), "Output tokens": count(row.output_tokens),
      "First token p50": seconds(row.ttft_p50_s), p99: seconds(row.ttft_p99_s),
    }).map(([label, text]) => el("td", { class: "num", "data-label": label }, text)))));
}
