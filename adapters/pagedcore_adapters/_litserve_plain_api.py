"""The small way in: an engine in each worker of somebody's own `LitServer`, behind their own routes and forms."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, cast, get_type_hints

from fastapi import FastAPI, HTTPException, Request, Response
from litserve import LitAPI

from pagedcore import AsyncEngine, EngineConfig, RequestOutput, SamplingParams
from pagedcore.client import RequestContext
from pagedcore.errors import ConfigError, InvalidRequestError, PagedCoreError
from pagedcore.openai.errors import body_of
from pagedcore.remote.attached import ENGINE_START_TIMEOUT_S
from pagedcore.shown import shown
from pagedcore.tools.messages import TemplateArguments, render
from pagedcore.warm_up import WarmUpPrompt, as_token_ids
from pagedcore_adapters._litserve_hooks import current_worker_id
from pagedcore_adapters._prometheus_dir import engine_label, ensure_multiprocess_dir, forget_ended_processes, multiprocess_metrics

CONTEXT = RequestContext(adapter="litserve")
PARAMETERS = frozenset(field.name for field in fields(SamplingParams)) - {"n", "logprobs", "prompt_logprobs", "structured_outputs"}
"""What the default `decode_request` takes: those whose effect the default `encode_response` shows, in forms that JSON has."""

Outputs = AsyncGenerator[RequestOutput, None]


class PagedCoreAPI(LitAPI):
    """A LitAPI whose requests are batched by an engine of ours. Owns the engine of its worker process.

    Override `decode_request` (anything to what `predict` takes) and `encode_response` (outputs to anything), both with `async def`;
    each runs in the worker, where `self.engine` is. LitServe tells a worker nothing of clients that leave: what they asked for is computed
    to its end. `build_server` does better, and has OpenAI's routes.
    """

    engine: AsyncEngine
    """Of this worker process; absent elsewhere."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _resolve_annotations(cls)

    def __init__(
        self,
        config: EngineConfig | Mapping[str, Any] | None = None,
        warm_up_prompts: Sequence[WarmUpPrompt] = (),
        *,
        socket: str | Path | None = None,
        **options: Any,
    ) -> None:
        """`socket` is that of an engine which runs already (`pagedcore engine --socket PATH`) and which all workers then share.
        `options` are LitAPI's own, such as api_path and stream.

        Raises `ConfigError` for a max_batch_size, since the engine batches, and for a config or prompts beside a socket.
        """
        if socket is not None and (config is not None or warm_up_prompts):
            raise ConfigError(
                f"The engine at {str(socket)!r} has its config and its warm-up prompts from where it was started; give none here."
            )
        if options.get("max_batch_size", 1) != 1:
            raise ConfigError(
                f"max_batch_size is {options['max_batch_size']!r}, and the engine batches by itself; set max_num_seqs instead."
            )
        super().__init__(**{"enable_async": True, **options})
        self.config = config if isinstance(config, EngineConfig) else EngineConfig.from_mapping(config or {})
        self.warm_up_prompts = tuple(warm_up_prompts)
        self.socket = socket
        ensure_multiprocess_dir()
        if options.get("stream"):
            self._stream_by_default()

    def setup(self, device: str) -> None:
        """Load the model and warm up. Raises what `AsyncEngine` raises."""
        if self.socket is not None:
            self.engine = AsyncEngine.connect(self.socket, timeout_s=ENGINE_START_TIMEOUT_S)
            return
        forget_ended_processes()
        config = self.config.replace(metrics_instance=engine_label(self.config, current_worker_id()))
        self.engine = self.make_engine(config if device == "cpu" else config.replace(device=device))
        self.engine.warm_up([as_token_ids(prompt, self.engine.text) for prompt in self.warm_up_prompts])

    def make_engine(self, config: EngineConfig) -> AsyncEngine:
        """The engine of this worker process."""
        return AsyncEngine(config)

    async def decode_request(self, request: Request, **unused: Any) -> Any:
        """A JSON object with `prompt` or `messages`, and sampling parameters by name, as what `predict` takes.

        Raises `HTTPException` 400 for anything else. `request` is the parsed body: its annotation tells LitServe how to parse.
        """
        try:
            return await asyncio.to_thread(self._read, request)
        except PagedCoreError as error:
            raise _http_error(error) from error

    async def predict(self, x: Any, **unused: Any) -> RequestOutput:
        """A prompt (text, token ids, or a mapping that has it), or a pair of it and `SamplingParams`: its last output. What the engine
        refuses is an `HTTPException`."""
        try:
            return [output async for output in self.predict_stream(x)][-1]
        except PagedCoreError as error:
            raise _http_error(error) from error

    async def predict_stream(self, x: Any, **unused: Any) -> AsyncGenerator[RequestOutput, None]:
        """`predict` with stream=True: all outputs as they come. What the engine refuses is raised as it is: the answer has begun."""
        prompt, params = x if isinstance(x, tuple) and len(x) == 2 and isinstance(x[1], SamplingParams) else (x, SamplingParams())
        async with aclosing(cast("Outputs", self.engine.generate(prompt, params, context=CONTEXT))) as outputs:
            async for output in outputs:
                if output.error is not None:
                    raise output.error
                yield output

    async def encode_response(self, output: Any, **unused: Any) -> Any:
        """An output as a JSON object: `text`, `finish_reason` and token counts."""
        return _described(output, output.outputs[0].text)

    async def encode_stream(self, output: Any, **unused: Any) -> AsyncGenerator[Any, None]:
        """`encode_response` with stream=True: an object for each piece of new text, and an `error` where there is one."""
        async with aclosing(output) as outputs:
            try:
                async for one in outputs:
                    yield _described(one, one.text)
            except PagedCoreError as error:
                yield body_of(error)

    def _stream_by_default(self) -> None:
        """LitServe wants generator functions for a stream, and others without one."""
        if type(self).predict is PagedCoreAPI.predict:
            self.predict = self.predict_stream  # type: ignore[method-assign, assignment]
        if type(self).encode_response is PagedCoreAPI.encode_response:
            self.encode_response = self.encode_stream  # type: ignore[method-assign, assignment]

    def _read(self, body: Any) -> tuple[Any, SamplingParams]:
        if not isinstance(body, Mapping) or ("prompt" in body) == ("messages" in body):
            raise InvalidRequestError("The body must be a JSON object with either prompt or messages.", param="prompt")
        rest = {name: value for name, value in body.items() if name not in ("prompt", "messages")}
        if unknown := sorted(rest.keys() - PARAMETERS):
            raise InvalidRequestError(f"This route takes no parameter {shown(unknown[0])}.", param=unknown[0])
        prompt = body["prompt"] if "prompt" in body else self.chat_prompt(body["messages"])
        return prompt, SamplingParams(**rest)

    def chat_prompt(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """The token ids of a conversation, by the model's chat template. Raises `RequestError` where it has none or refuses."""
        if not isinstance(messages, Sequence) or not messages or not all(isinstance(message, Mapping) for message in messages):
            raise InvalidRequestError("messages must be a list of objects with role and content, and not empty.", param="messages")
        text = self.engine.text
        if text is None:
            raise InvalidRequestError("The engine has no tokenizer (skip_tokenizer_init=True); give token ids.", param="messages")
        return text.encode(render(TemplateArguments(), messages, text), add_special_tokens=False)


def _resolve_annotations(cls: type) -> None:
    """LitServe and FastAPI read the annotations of these two, and cannot resolve the names of another module."""
    for name in ("decode_request", "encode_response"):
        function = vars(cls).get(name)
        if function is not None:
            with suppress(NameError):  # a class of a function's: as it would be without us
                function.__annotations__ = get_type_hints(function)


_resolve_annotations(PagedCoreAPI)


def add_metrics_route(app: FastAPI, path: str = "/metrics") -> None:
    """Serve the numbers of all engines that the workers of a `LitServer` made on its app.

    Those of an engine at a socket are not among them: `self.engine.metrics_text()` and every OpenAI front of it have them.
    """

    @app.get(path)
    async def metrics() -> Response:
        text, content_type = multiprocess_metrics()
        return Response(text, headers={"Content-Type": content_type})


def _described(output: RequestOutput, text: str) -> dict[str, Any]:
    return {
        "text": text,
        "finish_reason": output.outputs[0].finish_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "num_output_tokens": len(output.outputs[0].token_ids),
    }


def _http_error(error: PagedCoreError) -> HTTPException:
    return HTTPException(error.http_status, body_of(error)["error"])
