"""`pagedcore trace`: what a running server remembers of its requests, as a file for a trace viewer."""

from __future__ import annotations

import json
from pathlib import Path

from pagedcore.commands.remote import ask_server
from pagedcore.errors import ConfigError, EngineClosedError

VIEWERS = "https://ui.perfetto.dev or chrome://tracing"


def fetch_trace(url: str, path: Path, api_key: str | None) -> str:
    """Write the trace of a server to a file; returns a line that says what is in it.

    Raises what `ask_server` raises, and `ConfigError` for a file that cannot be written.
    """
    trace = ask_server(url, "/v1/trace", api_key)
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise EngineClosedError(f"{url} gave no trace; is a pagedcore server there?")
    try:
        path.write_text(json.dumps(trace), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The trace cannot be written to {str(path)!r}: {error}; choose another file with -o.") from error
    tracks = [event for event in trace["traceEvents"] if event["name"] == "thread_name" and event["args"]["name"] != "steps"]
    num_steps = sum(event["ph"] == "X" and event["name"].endswith(" step") for event in trace["traceEvents"])
    return f"{path}: {len(tracks)} requests, {num_steps} steps. Open it in {VIEWERS}."
