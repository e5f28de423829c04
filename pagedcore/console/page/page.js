// The live page: tabs, the feed, and when to rest.

import { refreshAdvice } from "./advice.js";
import { WhatToChange } from "./change.js";
import { KeyNeeded, Live, hasKey, setKey } from "./client.js";
import { byId, el, setText } from "./dom.js";
import { Now } from "./now.js";
import { Requests } from "./requests.js";

const TABS = ["now", "requests", "advice"];
const SLOW_TAB_EVERY = { now: 30, requests: 2, advice: 10 };

const state = { tab: "now", engine: null, latest: null, isPaused: false, numEvents: 0 };

const now = new Now();
const requests = new Requests(onError);
const change = new WhatToChange(onError);
const live = new Live({ onEvent, onState: showState, onKeyNeeded: askForKey });

// ---- the feed

function onEvent(event) {
  state.latest = event;
  state.numEvents += 1;
  for (const stats of event.engines) now.note(stats);
  showEngines(event.engines);
  draw();
  if (state.numEvents % SLOW_TAB_EVERY[state.tab] === 0) refreshTab();
}

function shownStats() {
  const engines = state.latest?.engines ?? [];
  return engines.find((stats) => stats.engine === state.engine) ?? engines[0];
}

function draw() {
  const stats = shownStats();
  if (stats === undefined) return;
  setText("model", stats.model.split("/").at(-1));
  document.title = `${stats.num_running} running · pagedcore`;
  if (state.tab !== "now") return;
  now.draw(stats);
  change.draw(stats);
}

function showEngines(engines) {
  const choice = byId("engine"), names = engines.map((stats) => stats.engine);
  byId("engine-choice").hidden = names.length < 2;
  if (!names.includes(state.engine)) state.engine = names[0] ?? null;
  if ([...choice.options].map((option) => option.value).join() === names.join()) return;
  choice.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
  choice.value = state.engine;
}

function showState(name, message = "") {
  byId("live").dataset.state = name;
  setText("live", { live: "Live", lost: "Reconnecting", paused: "Paused", connecting: "Connecting" }[name]);
  byId("banner").hidden = message === "";
  byId("banner").textContent = message;
}

function onError(error) {
  if (error instanceof KeyNeeded) askForKey(error.message);
  else showState(byId("live").dataset.state, error.message);
}

// ---- when to rest: a page that is paused or not looked at holds no connection

function rest() {
  if (state.isPaused || document.hidden) {
    live.stop();
    showState("paused");
  } else {
    showState("connecting");
    live.start();
  }
}

byId("pause").addEventListener("click", () => {
  state.isPaused = !state.isPaused;
  byId("pause").setAttribute("aria-pressed", String(state.isPaused));
  setText("pause", state.isPaused ? "Resume" : "Pause");
  rest();
});
document.addEventListener("visibilitychange", rest);
window.addEventListener("pagehide", () => live.stop());
window.addEventListener("pageshow", rest);

// ---- the key

function askForKey(message) {
  live.stop();
  showState("paused");
  byId("key-error").hidden = !hasKey();
  byId("key-error").textContent = message;
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

byId("key-form").addEventListener("submit", () => {
  setKey(byId("key").value.trim());
  byId("key").value = "";
});
byId("key-dialog").addEventListener("close", () => { rest(); refreshTab(); });

// ---- tabs

function choose(tab, { focus = false } = {}) {
  state.tab = tab;
  for (const name of TABS) {
    const button = byId(`tab-${name}`), isChosen = name === tab;
    button.setAttribute("aria-selected", String(isChosen));
    button.tabIndex = isChosen ? 0 : -1;
    byId(name).hidden = !isChosen;
    if (isChosen && focus) button.focus();
  }
  history.replaceState(null, "", `#${tab}`);
  draw();
  refreshTab();
}

function refreshTab() {
  if (state.tab === "now") change.refresh().then(draw);
  if (state.tab === "requests") requests.refresh();
  if (state.tab === "advice") refreshAdvice(shownStats(), { onError, openRequest: (id) => requests.open(id) });
}

for (const name of TABS) byId(`tab-${name}`).addEventListener("click", () => choose(name));

document.querySelector(".tabs").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const target = { Home: 0, End: TABS.length - 1 }[event.key] ?? (step && (TABS.indexOf(state.tab) + step + TABS.length) % TABS.length);
  if (target === undefined) return;
  event.preventDefault();
  choose(TABS[target], { focus: true });
});

byId("engine").addEventListener("change", (event) => { state.engine = event.target.value; draw(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
window.addEventListener("resize", draw);

choose(TABS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "now");
rest();
