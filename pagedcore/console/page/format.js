// Numbers as people read them.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export const NOTHING = "–";

const MOST_MS = 999.5; // what rounds to a second is written as one

export function count(value) {
  return value === null || value === undefined ? NOTHING : whole.format(value);
}

export function percent(value) {
  if (value === null || value === undefined) return NOTHING;
  const points = value * 100;
  return `${points === 0 || points >= 99.95 || Number.isInteger(points) ? points.toFixed(0) : points.toFixed(1)} %`;
}

export function rate(value) {
  if (value === null || value === undefined) return NOTHING;
  return value >= 100 || value === 0 ? whole.format(value) : value.toFixed(1);
}

export function millis(ms) {
  if (ms === null || ms === undefined) return NOTHING;
  if (ms < 1) return ms === 0 ? "0 ms" : `${ms.toFixed(2)} ms`;
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  return ms < MOST_MS ? `${ms.toFixed(0)} ms` : seconds(ms / 1000);
}

export function seconds(s) {
  if (s === null || s === undefined) return NOTHING;
  if (s * 1000 < MOST_MS) return millis(s * 1000);
  if (s < 59.95) return `${s.toFixed(s < 10 ? 2 : 1)} s`;
  const rounded = Math.round(s), minutes = Math.round(s / 60);
  return rounded < 3600 ? `${Math.floor(rounded / 60)} min ${rounded % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function ago(s) {
  if (s < 2) return "now";
  if (s < 60) return `${Math.floor(s)} s ago`;
  return s < 3600 ? `${Math.floor(s / 60)} min ago` : `${Math.floor(s / 3600)} h ago`;
}

const WAITS = { blocks: "KV blocks", max_num_seqs: "a row (max_num_seqs)", token_budget: "room in a step", priority: "an earlier class", batch_window: "a fuller batch", next_step: "the next step", tenant_quota: "its quota" };

/** What a request waits for, in words. */
export function waitFor(reason) {
  return WAITS[reason] ?? reason.replaceAll("_", " ");
}

export function bytes(n) {
  if (!n) return NOTHING;
  return n >= 2 ** 30 ? `${(n / 2 ** 30).toFixed(1)} GiB` : `${(n / 2 ** 20).toFixed(0)} MiB`;
}
