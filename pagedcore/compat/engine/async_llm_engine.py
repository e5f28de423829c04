"""`from pagedcore.engine.async_llm_engine import AsyncLLMEngine`."""

from __future__ import annotations

from pagedcore.async_engine import AsyncEngine as AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
