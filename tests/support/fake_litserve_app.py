"""A LitServe server as `build_server` makes it, with fake engines in the workers; each prints what it gets.

Run as: python fake_litserve_app.py PORT WORKERS API_SERVERS KIND [DRAIN_TIMEOUT_S].
KIND is good, scheduled (a real scheduler and real metrics over a fake model), hanging (the same with a device that never answers in the
first life of a worker), broken (the engine cannot be made), slow (it is never
made), once (a worker that has ended cannot be made again) or apart (the engine is in a process of its own; see `support.fake_child`).
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from pagedcore import AsyncEngine, ConfigError, EngineConfig, ModelSourceError
from pagedcore.messages import InboxMessage
from pagedcore.openai import ServerSettings
from pagedcore.remote.loop import RemoteLoop
from pagedcore.remote.process import Supervised
from pagedcore_adapters._litserve_placement import Placement
from pagedcore_adapters._litserve_server import PagedServer, ServerOptions
from pagedcore_adapters._litserve_worker_api import WorkerAPI
from support.engine_builder import make_loop
from support.fake_engine import FakeLoop, make_byte_tokenizer


class TellingLoop(FakeLoop):
    """Says on standard output which message came to which worker process."""

    def submit(self, message: InboxMessage, outbox: Any = None) -> None:
        super().submit(message, outbox)
        print(f"worker {os.environ['LITSERVE_WORKER_ID']}: {type(message).__name__} {message.request_id}", flush=True)


class FakeAPI(WorkerAPI):
    def make_engine(self, config: EngineConfig) -> AsyncEngine:
        worker_id = int(os.environ["LITSERVE_WORKER_ID"])
        print(f"worker {worker_id}: Process {os.getpid()}", flush=True)
        if config.model == "broken":
            raise ModelSourceError("there is no such model")
        if config.model == "once" and self.incarnations[worker_id]:
            raise ConfigError("there is no memory left.")
        if config.model == "slow":
            print("loading", flush=True)
            threading.Event().wait()
        if config.model in ("scheduled", "hanging"):
            loop, runner = make_loop(metrics_instance=config.metrics_instance, num_blocks=2048)
            engine = AsyncEngine(loop=loop)
            if config.model == "hanging" and not self.incarnations[worker_id]:
                engine.warm_up = lambda prompts: runner.gate.clear()  # type: ignore[assignment]
            return engine
        if config.model == "apart":
            apart = EngineConfig(model="waits-later", metrics_instance=config.metrics_instance)
            return AsyncEngine(remote=RemoteLoop(Supervised(apart, module="support.fake_child")))
        folder = Path(tempfile.mkdtemp(prefix="pagedcore-fake-"))
        fake = TellingLoop(make_byte_tokenizer(folder), config=config)
        fake.plan.tokenizer_dir = str(folder)
        return AsyncEngine(loop=fake, text=fake.text)  # type: ignore[arg-type]


if __name__ == "__main__":
    port, num_workers, num_api_servers, kind, *rest = sys.argv[1:]
    options = ServerOptions(
        workers_per_device=int(num_workers),
        num_api_servers=int(num_api_servers),
        drain_timeout_s=float(rest[0]) if rest else ServerOptions().drain_timeout_s,
    )
    server = PagedServer(FakeAPI(EngineConfig(model=kind)), ServerSettings(), Placement("cpu", 1), options)
    server.run(host="127.0.0.1", port=int(port))
