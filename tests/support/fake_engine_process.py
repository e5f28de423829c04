"""`pagedcore engine` with a fake runner: `python -m support.fake_engine_process SOCKET [MODEL]`; see `support.fake_child`."""

from __future__ import annotations

import sys

from pagedcore.async_engine import AsyncEngine
from pagedcore.commands.engine_process import ending_signals, run_engine, served_engine
from pagedcore.config import EngineConfig
from pagedcore.observe.recorder import Recorder
from support.fake_child import build


def make_engine(config: EngineConfig) -> AsyncEngine:
    return AsyncEngine(loop=build(config, Recorder))


if __name__ == "__main__":
    config = EngineConfig(model=sys.argv[2] if len(sys.argv) > 2 else None)
    with served_engine(config, sys.argv[1], make_engine) as (engine, server), ending_signals() as signals:
        run_engine(engine, server, signals, drain_timeout_s=20.0)
