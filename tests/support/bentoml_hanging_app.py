"""A service for `bentoml serve support.bentoml_hanging_app:hanging`: the real scheduler and metrics over a fake runner.

HANGS names a file: the device of the worker that makes it never answers.
"""

from __future__ import annotations

import os
from pathlib import Path

from pagedcore import AsyncEngine, EngineConfig
from pagedcore_adapters import bentoml_service
from support.engine_builder import make_loop


def make_engine(config: EngineConfig) -> AsyncEngine:
    """In the stead of `shared_engine`."""
    loop, runner = make_loop(metrics_instance=config.metrics_instance)
    engine, mark = AsyncEngine(loop=loop), Path(os.environ["HANGS"])
    if not mark.exists():
        mark.touch()
        runner.gate.clear()
    return engine


bentoml_service.shared_engine = make_engine
hanging = bentoml_service.build_service({}, name="hanging")
