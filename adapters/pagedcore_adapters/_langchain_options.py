"""What one LangChain call asks for, by name: nothing is accepted and ignored."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedcore import SamplingParams
from pagedcore.client import RequestContext
from pagedcore.errors import InvalidRequestError, UnsupportedFeatureError
from pagedcore.grammar.fields import read_structured
from pagedcore.shown import shown
from pagedcore.structured_outputs import StructuredOutputsParams
from pagedcore.tools.definitions import Tools, read_tools

_SAMPLING = frozenset(f.name for f in dataclasses.fields(SamplingParams)) - {"logprobs", "prompt_logprobs", "structured_outputs"}
_CONTEXT = frozenset({"priority", "tenant", "cache_salt", "request_class", "user"})
_FORM = frozenset({"response_format", "structured_outputs"})
_CHAT = frozenset({"tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"})
_NOT_OFFERED = frozenset({"functions", "function_call", "logprobs", "prompt_logprobs"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """One call's options, checked."""

    params: SamplingParams
    """Without the form of the answer: what a chat's text must follow depends on its tools, too."""
    context: RequestContext
    structured: StructuredOutputsParams | None
    tools: Tools | None
    chat_template_kwargs: dict[str, Any]
    model: str | None


def read_options(options: Mapping[str, Any], *, is_chat: bool) -> CallOptions:
    """Raises `UnsupportedFeatureError` or `InvalidRequestError` for an option that would be ignored or that cannot be followed."""
    _check_names(options, is_chat=is_chat)
    tools = read_tools(options.get("tools"), options.get("tool_choice"), options.get("parallel_tool_calls"))
    given = {name: value for name, value in options.items() if name in _SAMPLING}
    structured = read_structured({name: _mapping(name, options.get(name)) for name in _FORM})
    if tools is not None or (is_chat and structured is not None):
        given.setdefault("skip_special_tokens", False)  # the markers of a call, or of reasoning before it, may be special tokens
    return CallOptions(
        params=SamplingParams(**given),
        context=RequestContext(adapter="langchain", **{name: value for name, value in options.items() if name in _CONTEXT}),
        structured=structured,
        tools=tools,
        chat_template_kwargs=_mapping("chat_template_kwargs", options.get("chat_template_kwargs")) or {},
        model=options.get("model"),
    )


def _check_names(options: Mapping[str, Any], *, is_chat: bool) -> None:
    known = _SAMPLING | _CONTEXT | _FORM | {"model"} | (_CHAT if is_chat else frozenset())
    for name in options:
        if name in _CHAT and not is_chat:
            raise UnsupportedFeatureError(f"{name} is for chats; use ChatPagedCore instead of PagedCoreLLM.", param=name)
        if name in _NOT_OFFERED:
            raise UnsupportedFeatureError(f"{name} is not offered by the LangChain models of this version; remove it.", param=name)
        if name not in known:
            raise InvalidRequestError(f"There is no option {name!r}; the options are: {', '.join(sorted(known))}.", param=name)


def _mapping(name: str, value: Any) -> Any:
    if value is None or isinstance(value, (Mapping, StructuredOutputsParams)):
        return value
    raise InvalidRequestError(f"{name} is {shown(value)} and must be a mapping.", param=name)
