"""An engine without a model: the real front over a loop that answers with a fixed text, one byte a step."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from pagedcore.advice.advisor import Advisor
from pagedcore.async_engine import AsyncEngine
from pagedcore.client import ModelInfo
from pagedcore.config import EngineConfig
from pagedcore.core.block_pool import BlockPool
from pagedcore.core.events import Finished
from pagedcore.errors import EngineClosedError
from pagedcore.messages import AbortRequest, AddRequest, FinishRequest, InboxMessage, RequestUpdate
from pagedcore.observe.recorder import Recorder, RecorderInfo
from pagedcore.outputs import CacheReport
from pagedcore.text.tokenizer import Tokenizer, load_tokenizer
from pagedcore.tracing.tracer import Tracer
from support.core_builders import make_limits

ANSWER = "The capital of France is Paris. "
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)

Outbox = Callable[[list[RequestUpdate]], None]


def make_byte_tokenizer(folder: Path) -> Tokenizer:
    """One token a byte, ids in the order of the byte-level alphabet; no special tokens."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    vocab = {piece: index for index, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}), encoding="utf-8")
    return load_tokenizer(folder)


@dataclass
class _Running:
    request: AddRequest
    outbox: Outbox
    num_tokens: int = 0


@dataclass
class FakeLoop:
    """Stands where an `EngineLoop` does. Every step gives each running request its next byte of `ANSWER`.

    `gather` holds the first step back until that many requests run at once, so that a test can prove that they do.
    """

    text: Tokenizer
    gather: int = 1
    config: EngineConfig = field(default_factory=EngineConfig)
    requests: list[AddRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)
    lost: list[Finished] = field(default_factory=list)
    is_closed: bool = False
    grammars: None = None

    def __post_init__(self) -> None:
        self.plan = SimpleNamespace(
            config=self.config, model_name="fake", device="fake", block_size=16, num_blocks=16, max_num_batched_tokens=2048
        )
        self.recorder = Recorder(RecorderInfo(model_name="fake", engine=self.config.metrics_instance), registry=CollectorRegistry())
        self.tracer = Tracer(self.recorder)
        self.advisor = Advisor(self.recorder, make_limits())
        self.pool = BlockPool(16, lambda *_: None)
        self.info = ModelInfo(model_names=("fake", "also-fake"), max_model_len=100_000, created_s=1, vocab_size=256)
        self._answer = self.text.encode(ANSWER)
        self._running: dict[str, _Running] = {}
        self._is_gathering = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def start_recording(self) -> None:
        """The device warm-up is over."""
        with self._changed:
            self.requests.clear()
            self.batch_sizes.clear()
            self._is_gathering = True

    def pause_recording(self) -> None:
        self._is_gathering = False

    def submit(self, message: InboxMessage, outbox: Outbox | None = None) -> None:
        self.raise_if_closed()
        with self._changed:
            if isinstance(message, AddRequest):
                assert outbox is not None
                self.requests.append(message)
                self._running[message.request_id] = _Running(message, outbox)
            elif isinstance(message, AbortRequest) and message.request_id in self._running:
                self.aborted.append(message.request_id)
                self._end(message.request_id, finish_reason="abort", status="aborted")
            elif isinstance(message, FinishRequest) and message.request_id in self._running:
                self._end(message.request_id, finish_reason="stop", status="completed")
            self._changed.notify_all()

    @property
    def is_alive(self) -> bool:
        return not self.is_closed

    @property
    def num_running(self) -> int:
        return len(self._running)

    def stats(self) -> Any:
        return SimpleNamespace(num_running=len(self._running), num_aborted=len(self.aborted))

    def count_lost(self, ends: Sequence[Finished]) -> None:
        """Requests that nobody else counts."""
        self.lost += ends

    def flush_metrics(self) -> None:
        """There are none."""

    def raise_if_away(self) -> None:
        self.raise_if_closed()

    def raise_if_closed(self) -> None:
        if self.is_closed:
            raise EngineClosedError("The engine is closed.")

    def close(self) -> None:
        with self._changed:
            self.is_closed = True
            for request_id in list(self._running):
                self._end(request_id, finish_reason="abort", status="aborted")
            self._changed.notify_all()

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
        """Wait for something about this engine to become true; False when time ran out."""
        with self._changed:
            return self._changed.wait_for(condition, timeout_s)

    def _end(self, request_id: str, **facts: Any) -> None:
        running = self._running.pop(request_id)
        running.outbox([RequestUpdate(request_id=request_id, new_token_ids=[], cache=_report(running.request), **facts)])

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.is_closed or len(self._running) >= (self.gather if self._is_gathering else 1))
                if self.is_closed:
                    return
                if self._is_gathering and len(self._running) >= self.gather:
                    self.gather = 1
                self._step()
                self._changed.notify_all()
            time.sleep(0.0005)  # a step takes time, in which others may submit and abort

    def _step(self) -> None:
        self.batch_sizes.append(len(self._running))
        batches: dict[Outbox, list[RequestUpdate]] = {}
        for running in list(self._running.values()):
            token_id = self._answer[running.num_tokens % len(self._answer)]
            running.num_tokens += 1
            is_last = running.num_tokens == running.request.params.max_tokens
            update = RequestUpdate(request_id=running.request.request_id, new_token_ids=[token_id], cache=_report(running.request))
            if is_last:
                update.finish_reason, update.status = "length", "completed"
                del self._running[running.request.request_id]
            batches.setdefault(running.outbox, []).append(update)
        for outbox, updates in batches.items():
            outbox(updates)


def _report(request: AddRequest) -> CacheReport:
    """As if the first four prompt tokens had been cached."""
    num_tokens = len(request.prompt_token_ids)
    cached = min(4, num_tokens - 1)
    return CacheReport(num_prompt_tokens=num_tokens, pool_tokens=cached, computed_tokens=num_tokens - cached)


def make_fake_engine(folder: Path, *, gather: int = 1) -> tuple[AsyncEngine, FakeLoop]:
    """An `AsyncEngine` over a `FakeLoop`, started; close it with `engine.close_sync()`."""
    loop = FakeLoop(make_byte_tokenizer(folder), gather=gather)
    return AsyncEngine(loop=loop, text=loop.text), loop  # type: ignore[arg-type]
