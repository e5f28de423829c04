"""LangChain's tools and schemas as options of a call, and the parsers of what comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Literal, get_args

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.base import OutputParserLike
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from pagedcore.errors import InvalidRequestError
from pagedcore.shown import shown

ToolLike = dict[str, Any] | type | Callable[..., Any] | BaseTool
Schema = dict[str, Any] | type
StructuredMethod = Literal["json_schema", "function_calling", "json_mode"]

_CHOICES = {True: "required", "any": "required", False: None}
"""Words of LangChain -> words of a request."""


def tool_options(
    tools: Sequence[ToolLike], choice: dict[str, Any] | str | bool | None, parallel: bool | None, strict: bool | None
) -> dict[str, Any]:
    """The options of a call that offers these tools."""
    definitions = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
    options: dict[str, Any] = {"tools": definitions}
    if isinstance(choice, str) and choice in [tool["function"]["name"] for tool in definitions]:
        choice = {"type": "function", "function": {"name": choice}}
    elif isinstance(choice, (str, bool)):
        choice = _CHOICES.get(choice, choice)
    if choice is not None:
        options["tool_choice"] = choice
    if parallel is not None:
        options["parallel_tool_calls"] = parallel
    return options


def form_options(schema: Schema, method: StructuredMethod, strict: bool | None) -> dict[str, Any]:
    """The options of a call whose text follows the schema, or that is any JSON object."""
    if method == "json_mode":
        return {"response_format": {"type": "json_object"}}
    return {"structured_outputs": {"json": _closed(convert_to_json_schema(schema, strict=strict))}}


def check_method(method: str) -> None:
    if method not in get_args(StructuredMethod):
        known = ", ".join(get_args(StructuredMethod))
        raise InvalidRequestError(f"method is {shown(method)} and must be one of {known}.", param="method")


def tool_name(schema: Schema) -> str:
    return str(convert_to_openai_tool(schema)["function"]["name"])


def parser_of(schema: Schema, method: StructuredMethod) -> OutputParserLike[Any]:
    """Gives objects of a pydantic class, and dictionaries for any other schema."""
    model: Any = schema if isinstance(schema, type) and is_basemodel_subclass(schema) else None
    if method == "function_calling":
        if model is None:
            return JsonOutputKeyToolsParser(key_name=tool_name(schema), first_tool_only=True)
        return PydanticToolsParser(tools=[model], first_tool_only=True)
    return JsonOutputParser() if model is None else PydanticOutputParser[Any](pydantic_object=model)


def parsed(
    model: Runnable[LanguageModelInput, AIMessage], parser: OutputParserLike[Any], *, include_raw: bool
) -> Runnable[LanguageModelInput, Any]:
    """What the parser reads out of the answer; with `include_raw` beside the answer, and its error is a value."""
    if not include_raw:
        return model | parser
    read = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | read.with_fallbacks([failed], exception_key="parsing_error")


def _closed(schema: Any) -> Any:
    """The schema, whose objects hold what it names and nothing made up, unless it says otherwise."""
    if isinstance(schema, list):
        return [_closed(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: value if name == "allOf" else _closed(value) for name, value in schema.items()}
    is_open = closed.get("type") == "object" and "properties" in closed and "patternProperties" not in closed
    return {**closed, "additionalProperties": False} if is_open and "additionalProperties" not in closed else closed
