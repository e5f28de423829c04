"""A LitServe server as `build_server` makes it, with fake engines in the workers.

Run as: python fake_litserve_app.py PORT WORKERS API_SERVERS KIND.
KIND is good, broken (the engine cannot be made) or slow (it is never made).
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path

from pagedcore import AsyncEngine, EngineConfig, ModelSourceError
from pagedcore.openai import ServerSettings
from pagedcore_adapters._litserve_placement import Placement
from pagedcore_adapters._prometheus_dir import ensure_multiprocess_dir
from pagedcore_adapters.litserve_api import PagedCoreAPI, PagedServer
from support.fake_engine import FakeLoop, make_byte_tokenizer


class FakeAPI(PagedCoreAPI):
    def make_engine(self, config: EngineConfig) -> AsyncEngine:
        if config.model == "broken":
            raise ModelSourceError("there is no such model")
        if config.model == "slow":
            print("loading", flush=True)
            threading.Event().wait()
        folder = Path(tempfile.mkdtemp(prefix="pagedcore-fake-"))
        loop = FakeLoop(make_byte_tokenizer(folder), config=config)
        loop.plan.tokenizer_dir = str(folder)
        return AsyncEngine(loop=loop, text=loop.text)  # type: ignore[arg-type]


if __name__ == "__main__":
    port, num_workers, num_api_servers, kind = sys.argv[1:]
    ensure_multiprocess_dir()
    server = PagedServer(
        FakeAPI(EngineConfig(model=kind)),
        ServerSettings(),
        Placement("cpu", 1),
        workers_per_device=int(num_workers),
        num_api_servers=int(num_api_servers),
    )
    server.run(host="127.0.0.1", port=int(port))
