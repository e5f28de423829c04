"""What runs in the worker processes of a `PagedServer`: the engine, and the loop that feeds it."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from litserve.loops import LitLoop
from litserve.specs.base import LitSpec

from pagedcore import EngineConfig
from pagedcore.errors import PagedCoreError
from pagedcore.warm_up import WarmUpPrompt
from pagedcore_adapters._litserve_hooks import current_worker_id, envelope
from pagedcore_adapters._litserve_messages import ControlQueue, Reply, WorkerAway, WorkerFacts, WorkerReady
from pagedcore_adapters._litserve_plain_api import PagedCoreAPI
from pagedcore_adapters._litserve_presence import Presence
from pagedcore_adapters._litserve_worker import WorkerBridge


class PagedSpec(LitSpec):
    """Keeps LitServe from adding a route of its own; ours are on its app already."""

    def __init__(self) -> None:
        super().__init__()
        self.api_path = "/v1/chat/completions"

    @property
    def stream(self) -> bool:
        return True


class PagedLoop(LitLoop):
    """The body of a worker process: its engine, fed from its own control queue."""

    def __call__(self, lit_api: WorkerAPI, device: str, worker_id: int, request_queue: Any, transport: Any, *unused: Any) -> None:
        def send(queue_id: int, reply: Reply) -> None:
            transport.send(envelope(reply, worker_id), queue_id)

        def tell_all(news: WorkerReady | WorkerAway) -> None:
            for queue_id in range(lit_api.num_api_servers):
                send(queue_id, news)

        engine, incarnation = lit_api.engine, lit_api.incarnations[worker_id]
        presence = Presence(worker_id, incarnation, engine.loop.raise_if_away, tell_all)
        bridge = WorkerBridge(engine.loop, lit_api.controls[worker_id], send, engine.inspect_sync, incarnation, presence.look)
        # A supervisor may signal every process of the server at once: open answers end first all the same.
        signal.signal(signal.SIGTERM, lambda *_: bridge.stop_when_idle())
        bridge.serve()


class WorkerAPI(PagedCoreAPI):
    """Builds one engine in each worker. Owns what the workers share with the API servers and the main process."""

    def __init__(
        self, config: EngineConfig | None = None, warm_up_prompts: Sequence[WarmUpPrompt] = (), *, socket: str | Path | None = None
    ) -> None:
        super().__init__(config, warm_up_prompts, socket=socket, spec=PagedSpec(), loop=PagedLoop())
        self.controls: list[ControlQueue] = []
        self.incarnations: list[int] = []
        """How often each worker has been started again; a worker knows its own from its start."""
        self.num_api_servers = 0
        self.facts: Any = {}
        """Of each worker that has ever been ready, in its last life."""
        self.ready: Any = {}
        """Worker -> time.monotonic() at which it became ready, while it is."""
        self.failures: Any = {}
        """Worker -> the error of ours that it met while it started."""

    def setup(self, device: str) -> None:
        """Load the model and warm up. The main process is told of an error of ours."""
        worker_id = current_worker_id()
        try:
            super().setup(device)
        except PagedCoreError as error:
            self.failures[worker_id] = error
            raise SystemExit(1) from error  # anything else would be logged by LitServe as a traceback
        facts = WorkerFacts(plan=self.engine.plan, info=self.engine.info, incarnation=self.incarnations[worker_id])
        self.facts[worker_id] = facts
        self.ready[worker_id] = time.monotonic()
