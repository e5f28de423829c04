"""The engine in a process of its own: the same messages as inside one process, over a Unix socket."""
