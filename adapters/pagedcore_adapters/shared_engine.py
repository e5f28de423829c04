"""One engine for each configuration in this process, for callers that bring none."""

from __future__ import annotations

import atexit
import threading

from pagedcore import AsyncEngine, EngineConfig
from pagedcore.errors import ConfigError
from pagedcore.observe.exposition import MetricsServer, start_metrics_server

_engines: dict[EngineConfig, AsyncEngine] = {}
_metrics_servers: dict[int, MetricsServer] = {}
_lock = threading.Lock()


def shared_engine(config: EngineConfig) -> AsyncEngine:
    """The running engine of `config`; the first call starts it. Raises what starting an engine raises."""
    with _lock:
        engine = _engines.get(config)
        if engine is None or not engine.loop.is_alive:
            engine = _engines[config] = AsyncEngine(config)
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
    """Close every shared engine; their requests end, and the next `shared_engine` starts a new one."""
    with _lock:
        engines = list(_engines.values())
        _engines.clear()
    for engine in engines:
        engine.close_sync()


atexit.register(close_shared_engines)
