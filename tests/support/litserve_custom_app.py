"""The custom LitServe example and the default routes, in stock LitServers of fake engines.

Run as: python litserve_custom_app.py PORT KIND. KIND is example (held back until four requests run at once), whole or stream.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import litserve as ls

from examples.litserve_custom import SummaryAPI
from pagedcore import AsyncEngine, EngineConfig
from pagedcore_adapters.litserve_api import PagedCoreAPI, add_metrics_route, stop_on_signals
from support.fake_engine import make_fake_engine


class FakeSummaryAPI(SummaryAPI):
    def make_engine(self, config: EngineConfig) -> AsyncEngine:
        return make_fake_engine(Path(tempfile.mkdtemp(prefix="pagedcore-fake-")), gather=4)[0]


class FakeAPI(PagedCoreAPI):
    def make_engine(self, config: EngineConfig) -> AsyncEngine:
        return make_fake_engine(Path(tempfile.mkdtemp(prefix="pagedcore-fake-")))[0]


if __name__ == "__main__":
    port, kind = sys.argv[1:]
    api = FakeSummaryAPI(api_path="/summarize") if kind == "example" else FakeAPI({"max_num_seqs": 8}, stream=kind == "stream")
    server = ls.LitServer(api, accelerator="cpu", timeout=False)
    add_metrics_route(server.app)
    stop_on_signals()
    server.run(host="127.0.0.1", port=int(port), generate_client_file=False)
