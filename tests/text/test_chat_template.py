"""Chat templates render as transformers renders them; what they cannot render is refused with the fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagedcore.errors import ConfigError, InvalidRequestError, UnsupportedFeatureError
from pagedcore.text.tokenizer import Tokenizer, load_tokenizer
from support.small_tokenizers import CHATML, load_saved, make_byte_level, save_folder

USER = {"role": "user", "content": "What is 2 < 3?"}
CONVERSATION = [
    {"role": "system", "content": "  Be brief. "},
    USER,
    {"role": "assistant", "content": "Yes"},
    {"role": "user", "content": "é"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<b>&'", "parameters": {"type": "object", "properties": {}}}}]

TEMPLATES = {
    "plain": CHATML,
    "blocks": """
        {%- for message in messages %}
            {%- if message.role == 'system' %}
{{ bos_token }}[SYS] {{ message.content | trim }}
            {%- else %}
[{{ loop.index0 }}:{{ message.role | upper }}] {{ message['content'] }}{{ eos_token }}
            {%- endif %}
        {%- endfor %}
        {%- if add_generation_prompt %}
[ASSISTANT]
        {%- endif %}
""",
    "tools": (
        "{% if tools %}{{ tools | tojson }}|{{ tools | tojson(indent=2) }}{% else %}none{% endif %}"
        "{% for m in messages %}{{ m | tojson }}{% endfor %}{{ documents is none }}"
    ),
    "trained_text": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
    ),
    "loops_and_dates": (
        "{{ strftime_now('%Y-%m') }}{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% if m.role == 'assistant' %}{% continue %}{% endif %}{{ ns.n }}"
        "{{ m.content }}{% if ns.n > 2 %}{% break %}{% endif %}{% endfor %}"
    ),
    "extra_variable": "{{ messages | length }}{{ enable_thinking is defined and enable_thinking }}{{ pad_token is defined }}",
}


def make_tokenizer(folder: Path, chat_template: Any = None, override: str | None = None) -> Tokenizer:
    config = {} if chat_template is None else {"chat_template": chat_template}
    return load_saved(folder, make_byte_level(), override=override, **config)


@pytest.mark.parametrize("kwargs", [{}, {"add_generation_prompt": False}, {"tools": TOOLS}, {"enable_thinking": True}], ids=str)
@pytest.mark.parametrize("name", TEMPLATES)
def test_rendering_equals_transformers(tmp_path: Path, name: str, kwargs: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    save_folder(tmp_path, make_byte_level(), chat_template=TEMPLATES[name])
    reference = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    expected = reference.apply_chat_template(CONVERSATION, tokenize=False, **{"add_generation_prompt": True, **kwargs})
    assert load_tokenizer(tmp_path).render_chat(CONVERSATION, **kwargs) == expected


def test_templated_text_needs_no_special_tokens_added(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, CHATML)
    ids = tokenizer.encode(tokenizer.render_chat([USER]), add_special_tokens=False)
    assert ids.count(0) == 2
    assert ids.count(1) == 1


def test_a_template_file_goes_before_the_configuration(tmp_path: Path) -> None:
    save_folder(tmp_path, make_byte_level(), chat_template=CHATML)
    (tmp_path / "chat_template.jinja").write_text("file: {{ messages[0].content }}", encoding="utf-8")
    assert load_tokenizer(tmp_path).render_chat([USER]) == "file: What is 2 < 3?"


@pytest.mark.parametrize(("kwargs", "text"), [({}, "usual"), ({"tools": TOOLS}, "with tools"), ({"tools": []}, "usual")])
def test_the_tool_template_is_taken_when_there_are_tools(tmp_path: Path, kwargs: dict[str, Any], text: str) -> None:
    named = [{"name": "default", "template": "usual"}, {"name": "tool_use", "template": "with tools"}]
    assert make_tokenizer(tmp_path, named).render_chat([USER], **kwargs) == text


def test_the_setting_may_be_text_a_file_or_the_name_of_a_template(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("from a file", encoding="utf-8")
    named = [{"name": "default", "template": "usual"}, {"name": "short", "template": "short one"}]
    overrides = {"{{ 'text' }}": "text", str(file): "from a file", "short": "short one"}
    shown = {override: make_tokenizer(tmp_path / "model", named, override).render_chat([USER]) for override in overrides}
    assert shown == overrides


@pytest.mark.parametrize(("override", "message"), [("missing.jinja", "neither Jinja text"), ("{% if %}", "not valid Jinja")])
def test_a_setting_that_is_no_template_is_refused_at_start(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_tokenizer(tmp_path, CHATML, override)


def test_without_a_template_chat_is_refused_with_the_fix_and_completions_work(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    assert tokenizer.encode("hello")
    with pytest.raises(InvalidRequestError, match="set chat_template") as error:
        tokenizer.render_chat([USER])
    assert error.value.http_status == 400


def test_a_model_with_named_templates_and_no_default_says_which_there_are(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="rag"):
        make_tokenizer(tmp_path, [{"name": "rag", "template": "x"}]).render_chat([USER])


def test_a_broken_template_of_the_model_fails_the_request_only(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="refused the messages"):
        make_tokenizer(tmp_path, "{% if %}").render_chat([USER])


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].nothing.at.all }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 // 0 }}",
    ],
)
def test_what_a_template_refuses_or_must_not_do_is_a_request_error(tmp_path: Path, template: str) -> None:
    with pytest.raises(InvalidRequestError, match="refused the messages"):
        make_tokenizer(tmp_path, template).render_chat([USER])


def test_text_parts_are_joined(tmp_path: Path) -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert make_tokenizer(tmp_path, "{{ messages[0].content }}").render_chat([{"role": "user", "content": content}]) == "a\nb"


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "http://x"}}, {"type": "input_audio", "input_audio": {}}])
def test_parts_that_are_no_text_are_refused(tmp_path: Path, part: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedFeatureError, match=r"messages\[0\]\.content\[1\]"):
        make_tokenizer(tmp_path, CHATML).render_chat([{"role": "user", "content": [{"type": "text", "text": "see"}, part]}])


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        [{"content": "no role"}],
        ["hello"],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [7]}],
    ],
)
def test_malformed_messages_are_refused(tmp_path: Path, messages: Any) -> None:
    with pytest.raises(InvalidRequestError) as error:
        make_tokenizer(tmp_path, CHATML).render_chat(messages)
    assert error.value.param == "messages"


def test_tool_calls_reach_the_template_with_their_arguments_as_an_object(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": "é"})}}
    tokenizer = make_tokenizer(tmp_path, "{{ messages[0].tool_calls[0].function.arguments.x }}[{{ messages[0].content }}]")
    assert tokenizer.render_chat([{"role": "assistant", "content": None, "tool_calls": [call]}]) == "é[]"


def test_messages_are_not_changed_by_rendering(tmp_path: Path) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}
    before = json.dumps(message)
    make_tokenizer(tmp_path, CHATML).render_chat([message])
    assert json.dumps(message) == before


def test_the_final_message_can_be_continued(tmp_path: Path) -> None:
    messages = [USER, {"role": "assistant", "content": "It is"}]
    text = make_tokenizer(tmp_path, CHATML).render_chat(messages, continue_final_message=True)
    assert text.endswith("<s>assistant\nIt is")


@pytest.mark.parametrize(
    "kwargs", [{"conversation": []}, {"chat_template": "x"}, {"continue_final_message": True, "add_generation_prompt": True}]
)
def test_contradicting_template_arguments_are_refused(tmp_path: Path, kwargs: dict[str, Any]) -> None:
    tokenizer = make_tokenizer(tmp_path, CHATML)
    with pytest.raises(InvalidRequestError):
        tokenizer.render_chat([USER], **kwargs)
