"""Chat templates: Jinja in a sandbox, rendered as the Hugging Face ecosystem renders them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedcore.errors import ConfigError, InvalidRequestError, UnsupportedFeatureError
from pagedcore.long_lists import discard

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.parser import Parser

_DEFAULT, _WITH_TOOLS = "default", "tool_use"
_RESERVED = ("conversation", "chat_template")
_CONTINUE_MARK = "\ue000pagedcore-continue\ue000"


class ChatTemplate:
    """The templates of one model, by name; most have one. Immutable, so threads may share it."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = dict(sources)

    def render(self, messages: Sequence[dict[str, Any]], special_tokens: Mapping[str, Any], kwargs: Mapping[str, Any]) -> str:
        """The prompt of a conversation. `kwargs` reach the template; `add_generation_prompt` is true unless given,
        `continue_final_message=True` leaves the last message open.

        Raises `InvalidRequestError` without a template, for malformed messages, or when the template refuses them.
        """
        for name in _RESERVED:
            if name in kwargs:
                raise InvalidRequestError(f"{name!r} cannot be a chat template argument.", param="chat_template_kwargs")
        options = {"tools": None, "documents": None, "add_generation_prompt": True, **special_tokens, **kwargs}
        continues = bool(options.pop("continue_final_message", False))
        conversation = normalise_messages(messages)
        if continues:
            options["add_generation_prompt"] = bool(kwargs.get("add_generation_prompt", False))
            _mark_end(conversation, options)
        text = _render(self._source(bool(options["tools"])), {**options, "messages": conversation})
        discard(conversation)
        return _cut_at_mark(text) if continues else text

    def compile(self) -> None:
        """Do now what the first conversation would have to wait for. What is wrong with a template is told to those who use it."""
        from jinja2 import TemplateError

        for source in self._sources.values():
            with suppress(TemplateError):
                _compile(source)

    def source(self, *, with_tools: bool) -> str | None:
        """The text of the template that a conversation, or one with tools, is rendered by."""
        own = self._sources.get(_DEFAULT)
        return self._sources.get(_WITH_TOOLS, own) if with_tools else own

    def _source(self, has_tools: bool) -> str:
        source = self.source(with_tools=has_tools)
        if source is not None:
            return source
        raise InvalidRequestError(_no_template_message(self._sources), param="messages", code="chat_template_missing")


def _no_template_message(sources: Mapping[str, str]) -> str:
    fix = "set chat_template (--chat-template) to Jinja text or a file, or use the completions API, which needs none"
    if sources:
        return f"The model has the chat templates {', '.join(sorted(sources))} and no default one; {fix}."
    return f"The model has no chat template; {fix}."


def load_chat_template(folder: Path, tokenizer_config: Mapping[str, Any], override: str | None) -> ChatTemplate:
    """The override (Jinja text, a file, or the name of one of the folder's templates), else the folder's own.

    Raises `ConfigError` for an override that is none of these, or that is not valid Jinja.
    """
    own = _own_templates(folder, tokenizer_config)
    if override is None:
        return ChatTemplate(own)
    source = own[override] if override in own else _read_override(override)
    _check(source, override)
    return ChatTemplate({_DEFAULT: source})


def _own_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """chat_template.jinja and additional_chat_templates/*.jinja go before tokenizer_config.json."""
    configured = tokenizer_config.get("chat_template") or {}
    if isinstance(configured, str):
        sources = {_DEFAULT: configured}
    elif isinstance(configured, list):
        sources = {entry["name"]: entry["template"] for entry in configured}
    else:
        sources = dict(configured)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = path.read_text(encoding="utf-8")
    main = folder / "chat_template.jinja"
    if main.is_file():
        sources[_DEFAULT] = main.read_text(encoding="utf-8")
    return sources


def _read_override(override: str) -> str:
    if "{" in override or "\n" in override:
        return override
    path = Path(override).expanduser()
    if not path.is_file():
        raise ConfigError(f"chat_template is {override!r}, which is neither Jinja text (there is no '{{' in it) nor a file.")
    return path.read_text(encoding="utf-8")


def _check(source: str, override: str) -> None:
    from jinja2 import TemplateError

    try:
        _compile(source)
    except TemplateError as error:
        raise ConfigError(f"chat_template {override[:60]!r} is not valid Jinja: {error}.") from error


def normalise_messages(messages: Any) -> list[dict[str, Any]]:
    """Copies of the messages as templates expect them: content a string, tool call arguments an object.

    Text parts are joined by a line break. Raises `InvalidRequestError` for messages that are malformed and
    `UnsupportedFeatureError` for parts that are no text.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidRequestError("messages must be a list of at least one message.", param="messages")
    return [_normalise_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _normalise_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"{where} must be an object with a role and a content, got {message!r}.", param="messages")
    copy = {key: value for key, value in message.items() if value is not None}
    copy["content"] = _text_of(message.get("content"), where)
    if "tool_calls" in copy:
        copy["tool_calls"] = [_with_parsed_arguments(call) for call in copy["tool_calls"]]
    return copy


def _text_of(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequestError(f"{where}.content must be a string or a list of parts, got {content!r}.", param="messages")
    return "\n".join(_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind is None or kind == "text":
        raise InvalidRequestError(f"{where} must be a string or an object with a type and a text, got {part!r}.", param="messages")
    raise UnsupportedFeatureError(f"{where} has the type {kind!r}; this model takes text parts only.", param="messages")


def _with_parsed_arguments(call: Any) -> Any:
    """OpenAI sends a call's arguments as JSON text; templates want the object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _mark_end(conversation: list[dict[str, Any]], options: Mapping[str, Any]) -> None:
    if options["add_generation_prompt"]:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other; give one of them.", param="continue_final_message"
        )
    conversation[-1]["content"] += _CONTINUE_MARK


def _cut_at_mark(text: str) -> str:
    if _CONTINUE_MARK not in text:
        raise InvalidRequestError(
            "The chat template does not show the final message, so it cannot be continued.", param="continue_final_message"
        )
    return text[: text.rindex(_CONTINUE_MARK)]


def _render(source: str, variables: Mapping[str, Any]) -> str:
    from jinja2 import TemplateError

    try:
        return _compile(source).render(variables)
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError, LookupError, ArithmeticError) as error:
        raise InvalidRequestError(
            f"The chat template refused the messages: {error}", param="messages", code="chat_template_error"
        ) from error


@lru_cache(maxsize=32)
def _compile(source: str) -> Template:
    template: Template = _environment().from_string(source)
    return template


@lru_cache(maxsize=1)
def _environment() -> Any:
    """The sandbox: templates come from model repositories and can neither call into Python nor change their inputs."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """`{% generation %}...{% endgeneration %}` marks trained text; here it is only its body."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
