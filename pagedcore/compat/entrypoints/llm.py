"""`from pagedcore.entrypoints.llm import LLM`."""

from __future__ import annotations

from pagedcore.llm import LLM

__all__ = ["LLM"]
