// Whose requests run and wait, and how each tenant fared in the last minute.

import { byId, el } from "./dom.js";
import { count, seconds } from "./format.js";

export function drawTenants(rows) {
  byId("tenants").hidden = rows.every((row) => row.tenant === "");
  byId("tenant-rows").replaceChildren(...rows.map((row) => el("tr", {},
    el("th", { scope: "row", class: "name", title: row.tenant }, row.tenant === "" ? "without a tenant" : row.tenant),
    ...[count(row.num_waiting), count(row.num_running), count(row.prompt_tokens), count(row.output_tokens), seconds(row.ttft_p50_s), seconds(row.ttft_p99_s)]
      .map((text) => el("td", { class: "num" }, text)))));
}
