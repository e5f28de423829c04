"""One request at a time: its life-cycle events, what it waited for, and where that goes (log, spans, trace file, live page)."""
