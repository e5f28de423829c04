"""What a server computes before its first request, so that the beginnings of prompts are in the prefix cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagedcore.client import TextFront
from pagedcore.errors import ConfigError
from pagedcore.tools.messages import TemplateArguments, render

WarmUpPrompt = str | list[dict[str, Any]]
"""Text as it is, or the messages that conversations begin with."""

FORMS = "a JSON list of texts and lists of messages, or one plain text a line"


def read_warm_up_file(path: str | Path, *, what: str = "warm-up file", flag: str = "--warmup-file") -> list[WarmUpPrompt]:
    """A JSON list of texts and lists of messages, or one text a line. Raises `ConfigError`, calling the file `what` and naming `flag`.

    A line that is a JSON object or list is refused: its braces and keys would be taken for text.
    """
    try:
        content = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"The {what} {str(path)!r} cannot be read: {reason}; check {flag}.") from error
    if not content.lstrip().startswith("["):
        return _plain_lines(content, f"{what} {str(path)!r}")
    try:
        prompts = json.loads(content)
    except ValueError as error:
        raise ConfigError(f"The {what} {str(path)!r} is not valid JSON: {error}; give {FORMS}.") from error
    if not all(isinstance(prompt, str) or _is_conversation(prompt) for prompt in prompts):
        raise ConfigError(f"The {what} {str(path)!r} must be a JSON list of texts and of lists of messages, or hold one text a line.")
    return list(prompts)


def as_token_ids(prompt: WarmUpPrompt, text: TextFront | None) -> list[int]:
    """The prompt as a request of a client would have it. Raises `ConfigError` without a tokenizer, and what the template raises."""
    if text is None:
        raise ConfigError("A warm-up file needs a tokenizer; leave out skip_tokenizer_init.")
    if isinstance(prompt, str):
        return text.encode(prompt)
    return text.encode(render(TemplateArguments(add_generation_prompt=False), prompt, text), add_special_tokens=False)


def _plain_lines(content: str, file: str) -> list[WarmUpPrompt]:
    lines = content.splitlines()
    for number, line in enumerate(lines, 1):
        if _is_json_object_or_list(line):
            raise ConfigError(f"Line {number} of the {file} is a JSON object or list; give {FORMS}.")
    return [line for line in lines if line.strip()]


def _is_json_object_or_list(line: str) -> bool:
    try:
        return isinstance(json.loads(line), (dict, list))
    except ValueError:
        return False


def _is_conversation(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(message, dict) for message in prompt)
