"""The bodies that clients may send, field by field. A value of null is the field's default everywhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidatorFunctionWrapHandler, WrapValidator

from pagedcore.long_lists import holds_only, is_within
from pagedcore.tools.fields import Neutral


def _check_token_ids(value: object, check: ValidatorFunctionWrapHandler) -> object:
    """Right ids pass as they are, looked at in pieces; what is wrong with others `check` says."""
    is_right = isinstance(value, list) and holds_only(value, int) and is_within(value, 0, 2**31)
    return value if is_right else check(value)


def _check_messages(value: object, check: ValidatorFunctionWrapHandler) -> object:
    """The same for objects, whose names are text in JSON."""
    return value if isinstance(value, list) and holds_only(value, dict) else check(value)


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True), WrapValidator(_check_token_ids)]
Strings = Annotated[list[str], Field(fail_fast=True)]
StopString = Annotated[str, Field(max_length=1024)]
StopStrings = Annotated[list[StopString], Field(max_length=64, fail_fast=True)]
StopTokenIds = Annotated[list[TokenId], Field(max_length=4096, fail_fast=True)]
BadWords = Annotated[list[Annotated[str, Field(max_length=256)]], Field(max_length=256, fail_fast=True)]
Messages = Annotated[list[dict[str, Any]], Field(fail_fast=True), WrapValidator(_check_messages)]

NOT_OFFERED: Neutral = {
    **dict.fromkeys(("guided_decoding_backend", "guided_whitespace_pattern", "moderation"), ()),
    **dict.fromkeys(("prompt_cache_options", "truncate_prompt_tokens"), ()),
    **dict.fromkeys(("early_stopping", "return_tokens_as_token_ids", "store", "use_beam_search"), (False,)),
    **dict.fromkeys(("allowed_token_ids", "logits_processors"), ([],)),
    "length_penalty": (1,),
    "prompt_cache_retention": ("in_memory",),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
}


class Strict(BaseModel):
    """Takes no unknown field and converts no value."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Body(Strict):
    """A request body. `not_offered` names fields that are valid elsewhere and refused here unless they ask for nothing."""

    not_offered: ClassVar[Neutral] = {}

    model: str | None = None

    _ignored: tuple[str, ...] = PrivateAttr(())

    @property
    def ignored(self) -> tuple[str, ...]:
        """Fields that came with the body and that the server's `ignored_fields` leaves out."""
        return self._ignored

    def leaving_out(self, names: Iterable[str]) -> Self:
        """The same, which knows that it came with these fields."""
        self._ignored = tuple(names)
        return self


class StreamOptions(Strict):
    """What a stream carries beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class GenerationBody(Body):
    """What completions and chat completions have in common. Ranges are checked by `SamplingParams`.

    Lists that cost work for every token or choice are limited here, so that no request stalls the others. The last four
    fields are the caller's notes: whom they name is logged, and no answer depends on any of them.
    """

    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    min_tokens: int = 0
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Strings | None = None
    guided_grammar: str | None = None
    stop: StopString | StopStrings = []
    stop_token_ids: StopTokenIds = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    bad_words: BadWords = []
    logit_bias: Annotated[dict[str, float], Field(max_length=4096)] = {}
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    request_id: str | None = None
    return_token_ids: bool = False
    cache_report: bool = False
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, Any] | None = None


class TemplateFields(Strict):
    """What shapes the prompt of a chat."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    not_offered: ClassVar[Neutral] = {**NOT_OFFERED, "suffix": ("",)}

    prompt: str | Strings | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    echo: bool = False
    logprobs: int | None = None


class ChatBody(TemplateFields, GenerationBody):
    """POST /v1/chat/completions."""

    not_offered: ClassVar[Neutral] = {
        **NOT_OFFERED,
        **dict.fromkeys(("audio", "chat_template", "mm_processor_kwargs", "prediction", "web_search_options"), ()),
        **dict.fromkeys(("documents", "functions"), ([],)),
        "function_call": ("none", "auto"),
        "echo": (False,),
        "modalities": (["text"],),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
    }

    messages: Messages
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class TokenizeBody(TemplateFields, Body):
    """POST /tokenize: a prompt, or the messages of a chat."""

    not_offered: ClassVar[Neutral] = {"chat_template": (), "tools": ([],), "mm_processor_kwargs": ()}

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: TokenIds
