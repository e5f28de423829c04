"""`cors_origins` through LitServe's app; each route is in tests/openai/test_cross_origin.py, BentoML in test_bentoml_native.py."""

from __future__ import annotations

import httpx
import pytest

from pagedcore import EngineConfig
from pagedcore.openai import ServerSettings
from pagedcore_adapters._litserve_placement import Placement
from pagedcore_adapters._litserve_server import PagedServer, ServerOptions
from pagedcore_adapters._litserve_worker_api import WorkerAPI

PAGE = "https://page.example"
ASKED = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


@pytest.mark.asyncio
async def test_litserve_answers_pages_of_the_list_and_lets_them_read_its_errors() -> None:
    server = PagedServer(WorkerAPI(EngineConfig()), ServerSettings(cors_origins=(PAGE,)), Placement("cpu", 1), ServerOptions())
    transport = httpx.ASGITransport(app=server.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers={"Origin": PAGE}) as client:
        preflight = await client.options("/v1/chat/completions", headers=ASKED)
        assert (preflight.status_code, preflight.headers["Access-Control-Allow-Headers"]) == (204, "authorization")
        unstarted = await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
        unknown = await client.post("/v1/embeddings", json={})
        refused = await client.post("/v1/completions", content="{}", headers={"Content-Type": "text/plain"})
    assert [reply.status_code for reply in (unstarted, unknown, refused)] == [503, 404, 415]
    for reply in (preflight, unstarted, unknown, refused):
        assert reply.headers.get_list("Access-Control-Allow-Origin") == [PAGE]
