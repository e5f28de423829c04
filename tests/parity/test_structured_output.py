"""The real model, small as it is, writes JSON that validates and calls that exist, because it has to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from pagedcore import LLM, SamplingParams, StructuredOutputsParams
from pagedcore.openai import build_app
from support.live_server import live_server
from support.parity import real_llm

pytestmark = pytest.mark.model

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog", "fish"]}, "maxItems": 3},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}
PROMPTS = ["Describe a person as JSON: ", "The capital of France is", "Once upon a time", "def main():"]
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nAnswer with <tool_call>{...}</tool_call>. Tools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS: Any = [
    {"type": "function", "function": {"name": "add_person", "parameters": PERSON}},
    {"type": "function", "function": {"name": "list_people", "parameters": {"type": "object", "properties": {}}}},
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    template = Path(tmp_path_factory.mktemp("template")) / "tools.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    with real_llm(chat_template=str(template)) as made:
        yield made


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[openai.OpenAI]:
    with live_server(build_app(llm.engine)) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as made:
        yield made


def check_person(person: Any) -> None:
    assert list(person) == ["name", "age", "pets"]
    assert 1 <= len(person["name"]) <= 20
    assert type(person["age"]) is int
    assert 0 <= person["age"] <= 120
    assert len(person["pets"]) <= 3
    assert set(person["pets"]) <= {"cat", "dog", "fish"}


def test_json_validates_at_every_temperature_and_free_neighbours_get_their_own_tokens(llm: LLM) -> None:
    form = StructuredOutputsParams(json=PERSON)
    held = [SamplingParams(temperature=t, seed=seed, max_tokens=160, structured_outputs=form) for t in (0.0, 0.8, 1.5) for seed in (1, 2)]
    free = [SamplingParams(temperature=0.8, seed=seed, max_tokens=20, ignore_eos=True) for seed in range(len(PROMPTS))]
    together = llm.generate([PROMPTS[0]] * len(held) + PROMPTS, [*held, *free])
    for output in together[: len(held)]:
        assert output.outputs[0].finish_reason == "stop"
        check_person(json.loads(output.outputs[0].text))
    alone = llm.generate(PROMPTS, free)
    assert [output.outputs[0].token_ids for output in together[len(held) :]] == [output.outputs[0].token_ids for output in alone]


def test_a_form_begins_after_the_text_that_ends_the_reasoning_and_what_comes_before_it_is_the_models_own(llm: LLM) -> None:
    """Here it ends with a sentence, whose stop this vocabulary also has at the beginning of longer tokens."""
    form: Any = {"json": PERSON, "disable_any_whitespace": True, "reasoning_end": "."}
    free = SamplingParams(temperature=0.0, max_tokens=120, stop=".", include_stop_str_in_output=True)
    held = [SamplingParams(temperature=t, seed=2, max_tokens=160, structured_outputs=form) for t in (0.0, 0.8)]
    own = [output.outputs[0].text for output in llm.generate(PROMPTS[1:], free)]
    greedy, drawn = (llm.generate(PROMPTS[1:], params) for params in held)
    for output in greedy + drawn:
        assert output.outputs[0].finish_reason == "stop"
        check_person(json.loads(output.outputs[0].text.partition(".")[2]))
    assert [output.outputs[0].text.partition(".")[0] + "." for output in greedy] == own


def test_choices_and_expressions_are_met(llm: LLM) -> None:
    forms: list[dict[str, Any]] = [
        {"choice": ["positive", "negative"]},
        {"regex": r"\d{4}-\d{2}-\d{2}"},
        {"grammar": 'root ::= "yes" | "no"'},
    ]
    texts = [
        llm.generate(PROMPTS[1], SamplingParams(temperature=1.0, seed=1, max_tokens=30, structured_outputs=form))[0].outputs[0].text  # type: ignore[arg-type]
        for form in forms
    ]
    assert texts[0] in ("positive", "negative")
    assert len(texts[1]) == 10
    assert texts[1].replace("-", "").isdigit()
    assert texts[2] in ("yes", "no")


def test_response_format_through_http_streams_json_that_validates(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    messages: Any = [{"role": "user", "content": "Invent a person."}]
    chunks = client.chat.completions.create(
        model=client.models.list().data[0].id, messages=messages, response_format=form, seed=3, stream=True, max_tokens=160
    )
    check_person(json.loads("".join(chunk.choices[0].delta.content or "" for chunk in chunks)))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add_person"}}])
def test_a_forced_call_names_a_tool_and_its_arguments_validate(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    fields: dict[str, Any] = {
        "model": client.models.list().data[0].id,
        "messages": [{"role": "user", "content": "Add Bob, who is 30 and has a cat."}],
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "seed": 5,
    }
    if stream:
        with client.chat.completions.stream(**fields) as events:
            answer = events.get_final_completion().choices[0]
    else:
        answer = client.chat.completions.create(**fields).choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "add_person" or (choice == "required" and call.function.name == "list_people")
    if call.function.name == "add_person":
        check_person(json.loads(call.function.arguments))
    else:
        assert json.loads(call.function.arguments) == {}


def test_a_schema_that_cannot_be_followed_is_a_400(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "strin"}}}
    with pytest.raises(openai.BadRequestError, match="response_format cannot be followed: Invalid type: strin") as caught:
        client.chat.completions.create(
            model=client.models.list().data[0].id, messages=[{"role": "user", "content": "a"}], response_format=form, stream=True
        )
    assert caught.value.param == "response_format"
