"""Which form of calls a chat template teaches."""

from __future__ import annotations

import pytest

from pagedcore.errors import UnsupportedFeatureError
from pagedcore.tools.forms import FormName, form_of

QWEN = '{% if tools %}<tools>{{ tools | tojson }}</tools> return <tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}'
LLAMA = '{% if tools is not none %}<|start_header_id|>Respond in the format {"name": function name, "parameters": values}{% endif %}'
PYTHON_TAG = "{% if builtin_tools %}<|python_tag|>{% endif %}"
MISTRAL = "{% if tools %}[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]"


@pytest.mark.parametrize(("template", "name"), [(QWEN, "hermes"), (LLAMA, "llama3"), (PYTHON_TAG, "llama3"), (MISTRAL, "mistral")])
def test_the_template_says_the_form(template: str, name: str) -> None:
    assert form_of(template).name == name


@pytest.mark.parametrize("setting", ["hermes", "llama3", "mistral"])
def test_a_setting_goes_before_the_template(setting: FormName) -> None:
    assert form_of("{{ tools }} in a form of its own", setting).name == setting


@pytest.mark.parametrize("setting", ["auto", "hermes"])
@pytest.mark.parametrize("template", [None, "{{ messages }}"])
def test_a_template_that_shows_no_tools_cannot_be_offered_any(template: str | None, setting: FormName) -> None:
    with pytest.raises(UnsupportedFeatureError, match="does not show them") as caught:
        form_of(template, setting)
    assert caught.value.param == "tools"


@pytest.mark.parametrize("template", ["{{ tools }}", MISTRAL + "[ARGS]", QWEN + "<function=name>", QWEN + "<arg_key>"])
def test_another_form_is_refused_and_the_setting_named(template: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match="hermes, llama3, mistral; set tool_parser"):
        form_of(template)
