"""What one engine answers to an operator. Runs where the engine does; needs no web framework."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Literal

from pagedcore.client import TextFront
from pagedcore.console.block_map import block_map
from pagedcore.console.excerpts import Excerpts
from pagedcore.console.explanation import explain, for_tenant, miss_for_tenant
from pagedcore.console.pace import Pace
from pagedcore.console.tenants import TenantBook
from pagedcore.engine_loop import EngineLoop
from pagedcore.errors import InvalidRequestError
from pagedcore.shown import shown
from pagedcore.tracing.life import Life
from pagedcore.tracing.record import facts_of, is_match, record_of

TextOf = Literal["none", "own", "all"]
"""Whose prompt text an answer may hold: nobody's, that of the caller's own tenant, or everybody's."""

Answer = dict[str, Any]
"""JSON-able; empty where this engine knows nothing of what was asked."""


class Inspector:
    """Owns what an engine keeps for its operator beside its numbers. `answer` may be called from any thread.

    It reads what the engine thread wrote and never waits for it, so an engine whose device hangs answers too.
    """

    def __init__(self, loop: EngineLoop, text: TextFront | None) -> None:
        self._loop = loop
        self._text = text
        self._pace = Pace()
        self._tenants = TenantBook()
        self._excerpts = Excerpts()
        loop.recorder.add_listener(self._pace.record)
        loop.recorder.add_listener(self._tenants.record)
        loop.recorder.add_listener(self._excerpts.record)
        self._history = loop.tracer.history
        self._answers: dict[str, Callable[..., Answer]] = {
            "stats": self.stats,
            "blocks": self.blocks,
            "explain": self.explain,
            "requests": self.requests,
            "request": self.request,
            "advice": self.advice,
            "trace": self.trace,
        }

    def answer(self, question: str, arguments: dict[str, Any]) -> Answer:
        """Raises `InvalidRequestError` for a question that no engine answers."""
        find = self._answers.get(question)
        if find is None:
            raise InvalidRequestError(f"The question is {shown(question)} and must be one of {', '.join(self._answers)}.", param="question")
        return find(**arguments)

    def stats(self) -> Answer:
        """`engine.stats()`, the hit rates worked out, what the engine is, the pace of the last minute, and the tenants who asked."""
        recorder, plan = self._loop.recorder, self._loop.plan
        snapshot = recorder.stats()
        rates = {"page": snapshot.hit_rate("page"), "prefix": snapshot.hit_rate("prefix"), "pool": snapshot.hit_rate("pool")}
        return {
            "engine": recorder.engine,
            "model": plan.model_name,
            "device": plan.device,
            "block_size": plan.block_size,
            "num_blocks": plan.num_blocks,
            "max_num_seqs": plan.config.max_num_seqs,
            "max_num_batched_tokens": plan.max_num_batched_tokens,
            "scheduling_policy": plan.config.scheduling_policy,
            "enable_prefix_caching": plan.config.enable_prefix_caching,
            **dataclasses.asdict(snapshot),
            "hit_rate": self._rates({**rates, "ideal": snapshot.ideal_hit_rate}),
            "last_minute": {**self._pace.last_minute(), "hit_rate": self._rates(recorder.recent_rates())},
            "tenants": self._tenants.summary(),
        }

    def blocks(self) -> Answer:
        """The KV pool as a map."""
        return {"engine": self._loop.recorder.engine, **block_map(self._loop.pool)}

    def explain(self, request_id: str, tenant: str | None = None, is_operator: bool = True, show_text: TextOf = "own") -> Answer:
        """Why a request hit or missed. Empty for one that is not known, or not the caller's: an operator asks for all, a tenant
        for his own."""
        explained, excerpt = self._loop.recorder.explained(request_id), self._excerpts.find(request_id)
        if explained is None or excerpt is None or not (is_operator or excerpt.tenant == tenant):
            return {}
        report, reasons = explained
        if not is_operator:
            report, reasons = for_tenant(report, reasons)
        answer = explain(request_id, report, reasons, self._loop.plan.block_size)
        answer |= {"engine": self._loop.recorder.engine, "tenant": excerpt.tenant}
        if self._text is None or show_text == "none" or (show_text == "own" and excerpt.tenant != tenant):
            return answer
        if answer["first_divergence"] is not None:
            around = {"text_before": excerpt.before, "text_after": excerpt.after}
            answer["first_divergence"] |= {name: _decode(self._text, token_ids) for name, token_ids in around.items()}
        if show_text == "all":
            answer["prompt_head"] = _decode(self._text, excerpt.head)
        return answer

    def requests(self, limit: int = 50, search: str = "", tenant: str | None = None, is_operator: bool = True) -> Answer:
        """Records of running and ended requests without their events, the newest first: of all, or of one tenant."""
        now_s = time.monotonic()
        lives = sorted(self._history.lives(), key=lambda life: -life.request.arrival_s)
        found = (life for life in lives if (is_operator or life.request.tenant == tenant) and is_match(life, search))
        return {"requests": [self._record(facts_of(life), life, now_s, is_operator) for life in islice(found, limit)]}

    def request(self, request_id: str, tenant: str | None = None, is_operator: bool = True) -> Answer:
        """One record with its events. Empty for a request that is not known, or not the caller's."""
        found = (life for life in reversed(self._history.lives()) if life.request.request_id == request_id)
        life = next(found, None)
        if life is None or not (is_operator or life.request.tenant == tenant):
            return {}
        return self._record(record_of(life), life, time.monotonic(), is_operator)

    def advice(self) -> Answer:
        """What other pools and block sizes would have done."""
        return {"engine": self._loop.recorder.engine, **self._loop.advisor.advice().as_dict()}

    def trace(self) -> Answer:
        """A Chrome/Perfetto trace of the remembered requests and steps."""
        return self._loop.tracer.chrome_trace()

    def _rates(self, rates: dict[str, float]) -> dict[str, float | None]:
        """JSON has no NaN: null where there was nothing to take a part of. Nobody knows the ideal while nothing is looked for."""
        if not self._loop.plan.config.enable_prefix_caching:
            rates = {**rates, "ideal": math.nan}
        return {name: None if math.isnan(value) else value for name, value in rates.items()}

    def _record(self, record: Answer, life: Life, now_s: float, is_operator: bool) -> Answer:
        if not is_operator:
            served, diverged_at = sum(record["cached_tokens"].values()), record["first_divergence"]
            record["miss"] = miss_for_tenant(record["miss"], served=served, diverged_at=diverged_at)
        return {**record, "engine": self._loop.recorder.engine, "age_s": now_s - life.request.arrival_s}


def _decode(text: TextFront, token_ids: Sequence[int]) -> str:
    return text.decode(token_ids, skip_special_tokens=False)
