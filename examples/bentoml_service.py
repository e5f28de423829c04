"""A BentoML service: `bentoml serve examples.bentoml_service:svc`.

Beside OpenAI's routes it has `generate`, `chat`, `generate_stream` and `chat_stream` for BentoML's clients:

    with bentoml.SyncHTTPClient("http://127.0.0.1:3000") as client:
        client.chat(messages=[{"role": "user", "content": "What is the capital of France?"}], max_tokens=20)["text"]
"""

from __future__ import annotations

from pagedcore import EngineConfig
from pagedcore_adapters.bentoml_service import build_service

svc = build_service(EngineConfig(max_num_seqs=64))
