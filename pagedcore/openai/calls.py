"""A checked body to a `Call`: what the engine is asked, and what the reply must show. Pure, and safe in a worker thread."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from pagedcore.client import EngineClient, ModelInfo, TextFront
from pagedcore.errors import InvalidRequestError, ModelNotFoundError, UnsupportedFeatureError
from pagedcore.grammar.fields import FIELDS, read_structured
from pagedcore.openai.bodies import ChatBody, CompletionBody, DetokenizeBody, GenerationBody, TokenizeBody
from pagedcore.openai.parsing import parse_body
from pagedcore.openai.settings import ServerSettings
from pagedcore.sampling_params import MAX_LOGPROBS, SamplingParams
from pagedcore.shown import shown
from pagedcore.structured_outputs import StructuredOutputsParams
from pagedcore.tools.answer import Answer, plan_answer
from pagedcore.tools.definitions import read_tools
from pagedcore.tools.messages import render

COMPLETION_MAX_TOKENS = 16
"""max_tokens of a completion that names none. A chat completion gets as many as the model allows."""

_SAMPLING_FIELDS = {field.name for field in dataclasses.fields(SamplingParams)} - {
    "logprobs",
    "max_tokens",
    "prompt_logprobs",
    "structured_outputs",
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; `text` is there where the reply may echo or continue it."""

    token_ids: list[int]
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request for generation, whichever route it came by."""

    endpoint: Literal["chat", "completion"]
    model: str
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    body: GenerationBody
    echo: bool = False
    answer: Answer = field(default_factory=Answer)


def read_completion(raw: bytes, client: EngineClient, settings: ServerSettings) -> Call:
    """A body of /v1/completions. Raises `RequestError` for all that is wrong with it."""
    body = parse_body(CompletionBody, raw, settings.ignored_fields)
    model = _checked_model(body, client.info)
    scored = body.logprobs if body.echo else None
    params = _sampling_params(body, body.logprobs, scored, COMPLETION_MAX_TOKENS, structured_outputs=_structured(body))
    prompts = _completion_prompts(body, client, settings)
    return Call(endpoint="completion", model=model, prompts=prompts, params=params, body=body, echo=body.echo)


def read_chat(raw: bytes, client: EngineClient, settings: ServerSettings) -> Call:
    """A body of /v1/chat/completions. Raises `RequestError` for all that is wrong with it."""
    body = parse_body(ChatBody, raw, settings.ignored_fields)
    model = _checked_model(body, client.info)
    _check_top_logprobs(body)
    _check_choices(body.n, "n", settings)
    text = required_text(client.text, "messages")
    tools = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    answer = plan_answer(tools, _structured(body), text, settings.tool_parser)
    rendered = render(body, body.messages, text, answer.shown_tools)
    answer = answer.continuing(rendered)
    # The template writes the special tokens itself.
    limit = client.info.max_model_len
    prompt = Prompt(text.encode(rendered, add_special_tokens=bool(body.add_special_tokens), max_prompt_tokens=limit), rendered)
    is_said = answer.is_plain or "skip_special_tokens" in body.model_fields_set
    markers: dict[str, bool] = {} if is_said else {"skip_special_tokens": False}
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = _sampling_params(body, logprobs, None, None, structured_outputs=answer.structured, **markers)
    return Call(endpoint="chat", model=model, prompts=(_not_empty(prompt, "messages"),), params=params, body=body, answer=answer)


def read_tokenize(raw: bytes, client: EngineClient, settings: ServerSettings) -> dict[str, object]:
    """The whole answer of /tokenize. Raises `RequestError`."""
    body = parse_body(TokenizeBody, raw)
    served_model(body.model, client.info)
    text = required_text(client.text, "prompt")
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("/tokenize needs either prompt or messages.", param="prompt")
    if body.messages is not None:
        token_ids = text.encode(render(body, body.messages, text), add_special_tokens=bool(body.add_special_tokens))
    else:
        token_ids = text.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
    return {"count": len(token_ids), "max_model_len": client.info.max_model_len, "tokens": token_ids}


def read_detokenize(raw: bytes, client: EngineClient, settings: ServerSettings) -> dict[str, object]:
    """The whole answer of /detokenize. Raises `RequestError`."""
    body = parse_body(DetokenizeBody, raw)
    served_model(body.model, client.info)
    text = required_text(client.text, "tokens")
    largest = max(body.tokens, default=0)
    if largest >= client.info.vocab_size > 0:
        raise InvalidRequestError(f"tokens holds {largest} and the model's ids end at {client.info.vocab_size - 1}.", param="tokens")
    return {"prompt": text.decode(body.tokens, skip_special_tokens=False)}


def served_model(name: str | None, info: ModelInfo) -> str:
    """The name to answer with; the main one where the client names none. Raises `ModelNotFoundError`."""
    if name is None:
        return info.model_names[0]
    if name not in info.model_names:
        raise ModelNotFoundError(f"The model {shown(name)} is not served here; served: {', '.join(info.model_names)}.", param="model")
    return name


def required_text(text: TextFront | None, param: str) -> TextFront:
    """The tokenizer. Raises `InvalidRequestError` where the engine has none."""
    if text is None:
        raise InvalidRequestError(f"{param} needs a tokenizer; this engine has none (skip_tokenizer_init). Send token ids.", param=param)
    return text


def _checked_model(body: GenerationBody, info: ModelInfo) -> str:
    if "stream_options" in body.model_fields_set and not body.stream:
        raise InvalidRequestError("stream_options needs stream=true.", param="stream_options")
    if body.best_of is not None and body.best_of != body.n:
        raise UnsupportedFeatureError(f"best_of={body.best_of} is not offered by this server unless it equals n={body.n}.", param="best_of")
    return served_model(body.model, info)


def _sampling_params(body: GenerationBody, logprobs: int | None, echoed: int | None, max_tokens: int | None, **more: Any) -> SamplingParams:
    """Raises `InvalidRequestError` for a value out of range. `echoed` asks for logprobs of the prompt; `max_tokens` is the default."""
    given = {name: getattr(body, name) for name in body.model_fields_set & _SAMPLING_FIELDS} | more
    scored = max((count for count in (body.prompt_logprobs, echoed) if count is not None), default=None)
    return SamplingParams(**given, max_tokens=_max_tokens(body, max_tokens), logprobs=logprobs, prompt_logprobs=scored)


def _structured(body: GenerationBody) -> StructuredOutputsParams | None:
    return read_structured({name: getattr(body, name) for name in FIELDS})


def _check_top_logprobs(body: ChatBody) -> None:
    if body.top_logprobs is None:
        return
    if not body.logprobs:
        raise InvalidRequestError(f"top_logprobs={body.top_logprobs} needs logprobs=true.", param="top_logprobs")
    if not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        message = f"top_logprobs is {shown(body.top_logprobs)} and must be between 0 and {MAX_LOGPROBS}."
        raise InvalidRequestError(message, param="top_logprobs")


def _max_tokens(body: GenerationBody, default: int | None) -> int | None:
    if body.max_completion_tokens is not None and body.max_completion_tokens < 1:
        message = f"max_completion_tokens is {shown(body.max_completion_tokens)} and must be at least 1."
        raise InvalidRequestError(message, param="max_completion_tokens")
    given = {limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None}
    if len(given) > 1:
        raise InvalidRequestError(f"max_tokens and max_completion_tokens differ ({sorted(given)}); give one.", param="max_tokens")
    return given.pop() if given else default


def _check_choices(num_choices: int, param: str, settings: ServerSettings) -> None:
    if num_choices > settings.max_choices:
        raise InvalidRequestError(
            f"{num_choices} choices are asked for and max_choices is {settings.max_choices}; ask for fewer.", param=param
        )


def _completion_prompts(body: CompletionBody, client: EngineClient, settings: ServerSettings) -> tuple[Prompt, ...]:
    prompt = body.prompt
    several = prompt if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int)) else [prompt]
    if not several:
        raise InvalidRequestError("prompt is an empty list; give at least one prompt.", param="prompt")
    _check_choices(len(several) * body.n, "prompt", settings)
    return tuple(_not_empty(_completion_prompt(one, body, client), "prompt") for one in several)


def _completion_prompt(prompt: object, body: CompletionBody, client: EngineClient) -> Prompt:
    if isinstance(prompt, str):
        text, is_added = required_text(client.text, "prompt"), body.add_special_tokens is not False
        return Prompt(text.encode(prompt, add_special_tokens=is_added, max_prompt_tokens=client.info.max_model_len), prompt)
    assert isinstance(prompt, list), "pydantic let nothing else pass"
    if not body.echo:
        return Prompt(prompt)
    return Prompt(prompt, required_text(client.text, "echo").decode(prompt, skip_special_tokens=body.skip_special_tokens))


def _not_empty(prompt: Prompt, param: str) -> Prompt:
    if not prompt.token_ids:
        raise InvalidRequestError(f"{param} holds no token; give some text.", param=param)
    return prompt
