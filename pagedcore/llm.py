"""`LLM`: the engine for scripts. Give it prompts, get outputs in their order."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any

from pagedcore.advice.advice import Advice
from pagedcore.async_engine import AsyncEngine, choose_params
from pagedcore.client import RequestContext
from pagedcore.errors import ConfigError, InvalidRequestError
from pagedcore.front import Prompt, TokenizedPrompt
from pagedcore.observe.stats import StatsSnapshot
from pagedcore.outputs import RequestOutput
from pagedcore.request_stream import QueueWaker, RequestStream
from pagedcore.sampling_params import SamplingParams
from pagedcore.shown import shown
from pagedcore.text.tokenizer import Tokenizer

Message = Mapping[str, Any]


class LLM:
    """One engine behind blocking calls. Thread-safe; `close` (or leaving a `with`) gives the device memory back.

    Takes the fields of `EngineConfig` as keywords; `model` may come first. No model is the embedded SmolLM2-135M-Instruct.
    """

    def __init__(self, model: str | None = None, *, engine: AsyncEngine | None = None, **options: Any) -> None:
        """`engine` is one that is there already, which `close` closes, too; it takes no settings. Raises `ConfigError` for both."""
        if engine is not None and (model is not None or options):
            raise ConfigError("The engine that was given has its settings already; give an engine, or a model and settings.")
        self._engine = engine or AsyncEngine({"model": model, **options})
        self._finalizer = weakref.finalize(self, self._engine.close_sync)

    @classmethod
    def connect(cls, path: str | Path, *, timeout_s: float = 0.0) -> LLM:
        """The same over an engine that runs at a Unix socket, which goes on after `close`; see `AsyncEngine.connect`."""
        return cls(engine=AsyncEngine.connect(path, timeout_s=timeout_s))

    # ---- requests

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        cache_salt: str | Sequence[str | None] | None = None,
        tenant: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts (text, token ids, or lists of them); one output a prompt, in order.

        `params`, `cache_salt`, `tenant` and `priority` are one value or one a prompt. `use_tqdm` shows a progress bar;
        None shows it for several prompts on a terminal. Raises `PromptTooLongError` or `PoolTooSmallError` before anything
        runs if one prompt can never fit, and the typed error of a request that fails later.
        """
        prompt_list = _as_prompt_list(prompts)
        tokenized = [self._engine.front.tokenize(prompt) for prompt in prompt_list]
        return self._run(tokenized, choose_params(params, sampling_params), cache_salt, tenant, priority, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | Sequence[str | None] | None = None,
        tenant: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template. See `generate` for the rest."""
        text = self.get_tokenizer()
        conversations = _as_conversations(messages)
        kwargs = {"add_generation_prompt": add_generation_prompt, **(chat_template_kwargs or {})}
        rendered = [text.render_chat([dict(m) for m in conversation], **kwargs) for conversation in conversations]
        tokenized = [self._engine.front.tokenize(prompt, add_special_tokens=False) for prompt in rendered]
        return self._run(tokenized, choose_params(params, sampling_params), cache_salt, tenant, priority, use_tqdm)

    def _run(
        self, prompts: list[TokenizedPrompt], params: Any, cache_salt: Any, tenant: Any, priority: Any, use_tqdm: bool | None
    ) -> list[RequestOutput]:
        count = len(prompts)
        all_params: list[SamplingParams] = _one_each("params", params, count, SamplingParams)
        contexts = [
            RequestContext(cache_salt=salt, tenant=name, priority=rank)
            for salt, name, rank in zip(
                _one_each("cache_salt", cache_salt, count, str),
                _one_each("tenant", tenant, count, str),
                _one_each("priority", priority, count, int),
                strict=True,
            )
        ]
        for prompt, request_params in zip(prompts, all_params, strict=True):
            self._engine.loop.check_request(len(prompt.token_ids), request_params.max_tokens)
            self._engine.front.prepare(request_params)
        return self._collect(prompts, all_params, contexts, use_tqdm)

    def _collect(
        self, prompts: list[TokenizedPrompt], params: list[SamplingParams], contexts: list[RequestContext], use_tqdm: bool | None
    ) -> list[RequestOutput]:
        """Open every request, then drain them all; whatever interrupts aborts the rest."""
        front, waker = self._engine.front, QueueWaker()
        streams: list[RequestStream] = []
        try:
            with self._engine.loop.gathering():
                for prompt, request_params, context in zip(prompts, params, contexts, strict=True):
                    streams.append(front.open(prompt, request_params, None, context=context, arrival_s=time.monotonic(), waker=waker))
            with _progress(len(streams), use_tqdm) as advance:
                _drain(streams, waker, advance)
        finally:
            for stream in streams:
                front.close_stream(stream)
        outputs = [stream.output() for stream in streams]
        _raise_first_error(outputs)
        return outputs

    # ---- questions and life

    @property
    def engine(self) -> AsyncEngine:
        """The engine itself; adapters may share it."""
        return self._engine

    @property
    def model_dir(self) -> Path:
        """Folder of the loaded model's files."""
        return Path(self._engine.plan.model_dir)

    def get_tokenizer(self) -> Tokenizer:
        """Raises `InvalidRequestError` with skip_tokenizer_init."""
        if self._engine.text is None:
            raise InvalidRequestError("The engine has no tokenizer (skip_tokenizer_init=True); give token ids.", param="prompt")
        return self._engine.text

    def stats(self) -> StatsSnapshot:
        """Every counter and gauge at this moment; subtract two for what happened between."""
        return self._engine.stats()

    def advice(self) -> Advice:
        """What other pools and block sizes would have done, and which prompts stand in their own way. For operators: it names tenants."""
        return self._engine.advice()

    def trace(self, path: str | Path) -> None:
        """Write the remembered requests and steps to a file that ui.perfetto.dev and chrome://tracing open.

        Raises `ConfigError` when it cannot be written.
        """
        self._engine.trace(path)

    def check(self) -> None:
        """Raise AssertionError where the engine's books contradict themselves. Safe in production."""
        self._engine.check()

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block; False when running requests still hold some."""
        return self._engine.reset_prefix_cache()

    def close(self) -> None:
        """Abort what still runs and give the device memory back. May be called twice."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _drain(streams: list[RequestStream], waker: QueueWaker, advance: Callable[[], None]) -> None:
    num_open = len(streams)
    while num_open:
        for stream in waker.wait():
            was_finished = stream.finished
            stream.absorb()
            if stream.finished and not was_finished:
                num_open -= 1
                advance()


def _raise_first_error(outputs: list[RequestOutput]) -> None:
    for output in outputs:
        if output.error is not None:
            raise output.error


def _as_prompt_list(prompts: Any) -> list[Prompt]:
    """A single prompt (text, token ids, mapping) as a list of one. Raises `InvalidRequestError` for what is neither."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if hasattr(prompts, "tolist"):  # an array or a tensor of token ids
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise InvalidRequestError(f"prompts must be text, token ids, or a list of them, got {type(prompts).__name__}.", param="prompts")
    if prompts and all(isinstance(token, Integral) for token in prompts):
        return [prompts]
    return list(prompts)


def _as_conversations(messages: Any) -> list[Sequence[Message]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidRequestError("messages must be a list of messages with role and content, or a list of such lists.", param="messages")
    conversations = [messages] if isinstance(messages[0], Mapping) else list(messages)
    for conversation in conversations:
        is_list = isinstance(conversation, Sequence) and not isinstance(conversation, str)
        if not is_list or not all(isinstance(message, Mapping) for message in conversation):
            raise InvalidRequestError(f"A conversation must be a list of messages, got {shown(conversation)}.", param="messages")
    return conversations


def _one_each(name: str, value: Any, count: int, kind: type) -> list[Any]:
    """One value a prompt: the same for all, or the given list. Raises `InvalidRequestError` when the lengths differ."""
    if value is None or isinstance(value, kind):
        return [value] * count
    if not isinstance(value, Sequence):
        raise InvalidRequestError(f"{name} must be one value or a list with one a prompt, got {shown(value)}.", param=name)
    values = list(value)
    if len(values) != count:
        raise InvalidRequestError(f"{name} has {len(values)} entries for {count} prompts; give one value or one a prompt.", param=name)
    return values


@contextmanager
def _progress(total: int, wanted: bool | None) -> Iterator[Callable[[], None]]:
    if not (wanted if wanted is not None else total > 1 and sys.stderr.isatty()):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("prompts", total=total)
        yield lambda: bar.advance(task)
