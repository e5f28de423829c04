"""A BentoML service: `bentoml serve examples.bentoml_service:svc`."""

from __future__ import annotations

from pagedcore import EngineConfig
from pagedcore_adapters.bentoml_service import build_service

svc = build_service(EngineConfig(max_num_seqs=64))
