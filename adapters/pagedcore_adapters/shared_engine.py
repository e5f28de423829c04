"""One engine for each configuration, and one connection for each socket, in this process, for callers that bring no engine."""

from __future__ import annotations

import atexit
import threading
from contextlib import ExitStack

from pagedcore import AsyncEngine, EngineConfig
from pagedcore.errors import ConfigError
from pagedcore.http.metrics_server import MetricsServer, start_metrics_server

_engines: dict[EngineConfig, AsyncEngine] = {}
_attached: dict[str, AsyncEngine] = {}
_metrics_servers: dict[int, MetricsServer] = {}
_lock = threading.Lock()


def shared_engine(config: EngineConfig) -> AsyncEngine:
    """The running engine of `config`; the first call starts it. Raises what starting an engine raises."""
    with _lock:
        engine = _engines.get(config)
        if engine is None or not engine.loop.is_alive:
            engine = _engines[config] = AsyncEngine(config)
        return engine


def attached_engine(socket: str) -> AsyncEngine:
    """The engine at a Unix socket, over the one connection of this process. Does not wait for one that still loads: a call asks for it.

    Raises what `AsyncEngine.connect` raises.
    """
    with _lock:
        engine = _attached.get(socket)
        if engine is None or not engine.loop.is_alive:
            engine = _attached[socket] = AsyncEngine.connect(socket)
        return engine


def serve_metrics(port: int) -> None:
    """Serve this process' Prometheus metrics on 127.0.0.1:port, once, until the process ends. Raises `ConfigError` for a port in use."""
    with _lock:
        if port in _metrics_servers:
            return
        try:
            _metrics_servers[port] = start_metrics_server(port)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"metrics_port is {port}, which cannot be used: {error}; choose another port.") from error


def close_shared_engines() -> None:
    """Close every shared engine and every connection to one; their requests end, and whoever asks next gets a new one."""
    with _lock:
        engines = [*_engines.values(), *_attached.values()]
        _engines.clear()
        _attached.clear()
    with ExitStack() as last:  # each is closed, whatever another one raises
        for engine in engines:
            last.callback(engine.close_sync)


atexit.register(close_shared_engines)
