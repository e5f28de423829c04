"""`AsyncEngine`: one engine for any number of event loops and threads of this process."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pagedcore.advice.advice import Advice
from pagedcore.client import ModelInfo, RequestContext
from pagedcore.config import EngineConfig, EnginePlan
from pagedcore.console.inspector import Inspector
from pagedcore.engine_build import build_engine
from pagedcore.engine_loop import EngineLoop
from pagedcore.errors import ConfigError, EngineError, InvalidRequestError
from pagedcore.front import Front, Prompt
from pagedcore.messages import InboxMessage
from pagedcore.observe.stats import StatsSnapshot
from pagedcore.outputs import RequestOutput
from pagedcore.sampling_params import SamplingParams
from pagedcore.shown import shown
from pagedcore.text.tokenizer import Tokenizer
from pagedcore.tracing.history import History

if TYPE_CHECKING:
    from pagedcore.remote.loop import RemoteLoop

_streamed_from: weakref.WeakKeyDictionary[object, AsyncEngine] = weakref.WeakKeyDictionary()
"""The engine of each stream that somebody holds: it lives as long. No cycle of references does this, since cycles that are older than
an engine's `GarbageHold` are not collected."""

WARM_UP_PROMPT = (1, 2)
"""Too short for a block of any size, so that a warm-up leaves nothing in the prefix cache."""


class AsyncEngine:
    """An engine and its front in one process. Owns both; `close` ends both, and so does forgetting the engine.

    Built without a running loop, used from several. Takes an `EngineConfig`, a mapping, or its fields as keywords.
    """

    def __init__(
        self,
        config: EngineConfig | Mapping[str, Any] | None = None,
        /,
        *,
        loop: EngineLoop | None = None,
        text: Tokenizer | None = None,
        remote: RemoteLoop | None = None,
        **options: Any,
    ) -> None:
        """`loop` is one that is made and not started (a fake runner's, in a test); it brings its own config. So does `remote`,
        which stands for a loop in another process."""
        if loop is None and remote is None:
            loop, remote = _build(as_config(config, options))
        self._remote = remote
        self._loop = loop if loop is not None else cast("EngineLoop", remote)
        self._is_warm = False
        self.config = self._loop.plan.config
        try:
            self.text: Tokenizer | None = text if text is not None else load_text(self._loop.plan)
            self._front = _connect(self._loop, self.text)
            self._inspector = Inspector(self._loop, self.text) if remote is None else remote.inspector
            self._loop.start()
            self._warm_up_device()
        except BaseException:
            self._loop.close()
            raise
        weakref.finalize(self, self._loop.close)

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig | Mapping[str, Any]) -> AsyncEngine:
        """The same, under the name people type."""
        return cls(engine_args)

    @classmethod
    def connect(cls, path: str | Path, *, timeout_s: float = 0.0) -> AsyncEngine:
        """Attach to an engine that runs at a Unix socket (`pagedcore engine --socket PATH`), as any number of processes of its user may.

        Tokenizing happens here, everything else there. `close` ends this front's requests, and the engine goes on. When the engine
        ends, requests fail with `EngineClosedError` until one of the same model is there again. `timeout_s` is how long to wait for
        an engine that still loads. Raises `EngineUnreachableError` where none answers, `ConfigError` for a path that cannot be one.
        """
        from pagedcore.remote.attached import Attachment
        from pagedcore.remote.loop import RemoteLoop

        return cls(remote=RemoteLoop(Attachment(path, timeout_s=timeout_s)))

    # ---- requests

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        context: RequestContext | None = None,
        add_special_tokens: bool = True,
        priority: int = 0,
        tenant: str | None = None,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Stream one request; see `EngineClient.generate`. `sampling_params` is another name of `params`."""
        named = RequestContext(priority=priority, tenant=tenant, cache_salt=cache_salt)
        if context is not None and named != RequestContext():
            raise InvalidRequestError("Give priority, tenant and cache_salt in the context or by name, not both.", param="context")
        context = context or named
        chosen: SamplingParams = choose_params(params, sampling_params)
        stream = self._front.generate(prompt, chosen, request_id, context=context, add_special_tokens=add_special_tokens)
        _streamed_from[stream] = self
        return stream

    def generate_sync(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        context: RequestContext | None = None,
        add_special_tokens: bool = True,
    ) -> Iterator[RequestOutput]:
        """The same as a blocking iterator for a plain thread; closing it early aborts the request."""
        chosen = params or SamplingParams()
        stream = self._front.generate_sync(prompt, chosen, request_id, context=context, add_special_tokens=add_special_tokens)
        _streamed_from[stream] = self
        return stream

    async def abort(self, request_id: str) -> None:
        """End a request in whatever state it is; its stream gets one last output with finish_reason "abort"."""
        await self._front.abort(request_id)

    def abort_sync(self, request_id: str) -> None:
        self._front.abort_sync(request_id)

    # ---- questions

    @property
    def info(self) -> ModelInfo:
        return self._loop.info

    @property
    def plan(self) -> EnginePlan:
        return self._loop.plan

    @property
    def front(self) -> Front:
        return self._front

    @property
    def loop(self) -> EngineLoop:
        """The engine thread, for a host that speaks messages with it."""
        return self._loop

    def stats(self) -> StatsSnapshot:
        """Every counter and gauge at this moment; subtract two for what happened between.

        An engine in a process of its own that was started again counts here from its new start; the counters of /metrics go on.
        """
        return self._loop.stats()

    @property
    def history(self) -> History:
        """The requests that run and the last ones that ended, each with its life-cycle events."""
        return self._loop.tracer.history

    def advice(self) -> Advice:
        """What other pools and block sizes would have done, and which prompts stand in their own way. Studies what has not been yet,
        so call it from a thread that may take a moment. For operators: it names tenants."""
        return self._loop.advisor.advice()

    def record_trace(self, path: str | Path | None) -> None:
        """Write every request that ends from now on to a file for `pagedcore advise`; None ends it, and so does `close`.

        The file holds the prompts of all tenants. Raises `ConfigError` when it cannot be opened.
        """
        self._loop.advisor.record_trace(path)

    def trace(self, path: str | Path) -> None:
        """Write the remembered requests and steps to a file that ui.perfetto.dev and chrome://tracing open.

        Raises `ConfigError` when it cannot be written.
        """
        self._loop.tracer.write(path)

    def check(self) -> None:
        """Raise AssertionError where the engine's books contradict themselves. Safe in production."""
        self._loop.check()

    def get_tokenizer(self) -> Tokenizer | None:
        return self.text

    async def is_ready(self) -> bool:
        is_there = self._loop.is_alive if self._remote is None else self._remote.is_linked
        return self._is_warm and is_there and not self._front.is_draining

    async def is_alive(self) -> bool:
        return self._loop.is_alive

    async def check_health(self) -> None:
        """Raise `EngineClosedError` unless the engine loop runs."""
        self._loop.raise_if_away()

    async def metrics_text(self, accept: str = "") -> tuple[bytes, str]:
        from pagedcore.observe.exposition import metrics_text

        if self._remote is not None:
            return await asyncio.to_thread(self._remote.metrics_text, accept)
        self._loop.flush_metrics()
        return metrics_text(accept=accept)

    async def inspect(self, question: str, **arguments: Any) -> list[dict[str, Any]]:
        """What an operator asks; see `EngineClient.inspect`."""
        return [await asyncio.to_thread(self._inspector.answer, question, arguments)]

    def inspect_sync(self, question: str, **arguments: Any) -> list[dict[str, Any]]:
        """The same from a plain thread."""
        return [self._inspector.answer(question, arguments)]

    # ---- life

    def warm_up(self, prompts: Sequence[Prompt] = ()) -> None:
        """Compute these prompts, so that their prefixes are cached, without counting them as traffic.

        Raises `EngineError` while requests are open (of their steps nothing would be counted, such as gaps between tokens and blocks
        acquired; see `EngineLoop.pause_recording`), and the error of a prompt that is refused.
        """
        if self._front.num_open:
            raise EngineError(f"{self._front.num_open} requests are open; warm up before the engine takes traffic.")
        self._loop.pause_recording()
        try:
            for prompt in prompts:
                self._compute(prompt, SamplingParams(temperature=0.0, max_tokens=1))
        finally:
            self._loop.start_recording()

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block; False when running requests still hold some."""
        return self._loop.reset_prefix_cache()

    async def drain(self, timeout_s: float = 30.0) -> bool:
        """Take no more requests and wait for the open ones; False when time ran out first."""
        self._front.begin_drain()
        return await asyncio.to_thread(self._front.drain, timeout_s)

    async def close(self) -> None:
        """Abort what still runs, stop the engine thread and give the device memory back."""
        await asyncio.to_thread(self.close_sync)

    def close_sync(self) -> None:
        self._loop.close()

    def shutdown(self) -> None:
        """`close_sync` under the name people type."""
        self.close_sync()

    def _warm_up_device(self) -> None:
        if self._remote is not None:  # it is warm
            self._is_warm = True
            return
        prompt = [token % max(self.info.vocab_size, 1) for token in WARM_UP_PROMPT]
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
        max_new = self.info.max_model_len - len(prompt)
        if max_new >= 1:
            self._compute(prompt, params.replace(max_tokens=min(2, max_new)))
        self._loop.start_recording()
        self._is_warm = True

    def _compute(self, prompt: Prompt, params: SamplingParams) -> None:
        for output in self._front.generate_sync(prompt, params):
            if output.error is not None:
                raise output.error


def _build(config: EngineConfig) -> tuple[EngineLoop | None, RemoteLoop | None]:
    """The loop in this process, or what stands for it."""
    if config.isolation == "thread":
        return build_engine(config), None
    from pagedcore.remote.loop import RemoteLoop
    from pagedcore.remote.process import Supervised

    return None, RemoteLoop(Supervised(config))


def _connect(loop: EngineLoop, text: Tokenizer | None) -> Front:
    """A front whose messages reach `loop`, and to which that answers."""

    def send(message: InboxMessage) -> None:
        loop.submit(message, front.deliver)

    front = Front(loop.info, text, send, loop.grammars)
    return front


def as_config(config: EngineConfig | Mapping[str, Any] | None, options: Mapping[str, Any]) -> EngineConfig:
    """One config out of what people pass: a config, a mapping, or keywords. Raises `ConfigError` for two at once."""
    if config is None:
        return EngineConfig.from_mapping(options)
    if options:
        raise ConfigError(f"Give a config or keywords, not both; put {', '.join(sorted(options))} into the config.")
    if isinstance(config, EngineConfig):
        return config
    if not isinstance(config, Mapping):
        raise ConfigError(f"config must be an EngineConfig or a mapping of its fields, got {shown(config)}; a model's name is model=NAME.")
    return EngineConfig.from_mapping(config)


def choose_params(params: Any, sampling_params: Any) -> Any:
    """The one that was given. Raises `InvalidRequestError` for both."""
    if params is not None and sampling_params is not None:
        raise InvalidRequestError("params and sampling_params are the same setting; give one of them.", param="sampling_params")
    given = params if params is not None else sampling_params
    return SamplingParams() if given is None else given


def load_text(plan: EnginePlan) -> Tokenizer | None:
    """The tokenizer of a plan's model, or None with skip_tokenizer_init."""
    if plan.config.skip_tokenizer_init:
        return None
    from pagedcore.text.tokenizer import load_tokenizer

    text = load_tokenizer(Path(plan.tokenizer_dir), chat_template=plan.config.chat_template)
    text.compile_templates()
    return text
