// The way to the server: requests with the key, and the feed as a stream of events.

const KEY = "pagedcore-api-key";
const RETRY_MS = [500, 1000, 2000, 4000, 8000];

export class KeyNeeded extends Error {}

/** What went wrong, in the server's words. */
export class Refused extends Error {}

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

async function ask(path, signal) {
  const key = sessionStorage.getItem(KEY);
  const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
  // The page is at .../ui, so a path is found beside it, also behind a proxy's prefix.
  const response = await fetch(new URL(path, document.baseURI), { headers, signal, cache: "no-store" });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `The server answered ${response.status}.`;
  throw response.status === 401 || response.status === 403 ? new KeyNeeded(message) : new Refused(message);
}

export async function getJson(path) {
  return (await ask(path)).json();
}

/** The feed. Nothing is open between `stop` and `start`. */
export class Live {
  constructor({ onEvent, onState, onKeyNeeded }) {
    this.handlers = { onEvent, onState, onKeyNeeded };
    this.abort = null;
  }

  start() {
    if (this.abort !== null) return;
    this.abort = new AbortController();
    this.run(this.abort.signal);
  }

  stop() {
    this.abort?.abort();
    this.abort = null;
  }

  async run(signal) {
    const { onEvent, onState, onKeyNeeded } = this.handlers;
    let failures = 0;
    while (!signal.aborted) {
      try {
        for await (const event of events(await ask("ui/feed", signal))) {
          failures = 0;
          onState("live");
          onEvent(event);
        }
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof KeyNeeded) {
          this.abort = null;
          onKeyNeeded(error.message);
          return;
        }
        failures += 1;
        onState("lost", error instanceof Refused ? error.message : "The server does not answer.");
      }
      // A stream that ended by itself is opened again at once; a server that is gone is not hammered.
      await pause(failures === 0 ? 50 : RETRY_MS[Math.min(failures, RETRY_MS.length) - 1], signal);
    }
  }
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    let end;
    while ((end = text.indexOf("\n\n")) >= 0) {
      const event = text.slice(0, end);
      text = text.slice(end + 2);
      const data = event.split("\n").find((line) => line.startsWith("data: "));
      if (event.startsWith("event: error")) throw new Refused(JSON.parse(data.slice(6)).error.message);
      if (data !== undefined) yield JSON.parse(data.slice(6));
    }
  }
}

function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
  });
}
