"""The form of an output is checked when it is made."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from pagedcore import SamplingParams, StructuredOutputsParams
from pagedcore.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"json": {"b": 1, "a": "é"}}, "json", '{"b": 1, "a": "é"}'),
        ({"json": ' {"b":1} '}, "json", '{"b": 1}'),
        ({"json_object": True}, "json_object", '{"type": "object"}'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ["a", "b"]}, "choice", '["a", "b"]'),
        ({"grammar": "start: A"}, "grammar", "start: A"),
    ],
)
def test_each_form_has_a_kind_and_a_text_and_travels(fields: dict[str, Any], kind: str, text: str) -> None:
    params = StructuredOutputsParams(**fields)
    assert (params.kind, params.text) == (kind, text)
    assert copy.deepcopy(params) == params
    assert hash(StructuredOutputsParams(**fields)) == hash(params)
    assert SamplingParams(structured_outputs=fields).structured_outputs == params  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "exactly one of json, json_object, regex, choice, grammar, got none"),
        ({"regex": "a", "json": {}}, "got json and regex"),
        ({"regex": ""}, "not empty"),
        ({"regex": 3}, "not empty"),
        ({"grammar": " "}, "not empty"),
        ({"choice": "ab"}, "a list of texts"),
        ({"choice": ["a", ""]}, "none of them empty"),
        ({"json": "[1]"}, "JSON schema"),
        ({"json": "{"}, "JSON schema"),
        ({"json": {"a": {1, 2}}}, "JSON schema"),
        ({"json_object": "yes"}, "true or false"),
        ({"regex": "a", "disable_any_whitespace": True}, "goes with json"),
        ({"json_object": True, "disable_any_whitespace": "no"}, "disable_any_whitespace must be true or false, got 'no'"),
        ({"json": {}, "regex": False}, "got json and regex"),
        ({"json_object": 0}, "json_object must be true or false, got 0"),
        ({"regex": "a", "reasoning_end": ""}, "reasoning_end must be a text of 1 to 64 characters, got ''"),
        ({"regex": "a", "reasoning_end": 7}, "reasoning_end must be a text of 1 to 64 characters, got 7"),
        ({"regex": "a", "reasoning_end": " \n"}, "reasoning_end must be a text"),
        ({"regex": "a", "reasoning_end": "\ud800"}, "reasoning_end must be a text"),
        ({"regex": "a", "reasoning_end": "x" * 65}, "reasoning_end must be a text"),
        ({"regex": "a", "reasoning_end": "x", "reasoning_start": []}, "reasoning_start must be a text"),
        ({"regex": "a", "reasoning_start": "<think>"}, "reasoning_start goes with reasoning_end"),
        ({"reasoning_end": "</think>"}, "got none"),
    ],
)
def test_what_is_wrong_is_said(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        StructuredOutputsParams(**fields)
    assert caught.value.param == "structured_outputs"


@pytest.mark.parametrize(
    ("value", "words"), [(7, "must be an object"), ({"backend": "x"}, "backend is not offered"), ({"json": None}, "none of them")]
)
def test_sampling_params_take_a_mapping_and_nothing_else(value: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        SamplingParams(structured_outputs=value)


def test_an_output_with_a_form_must_be_allowed_to_end() -> None:
    with pytest.raises(InvalidRequestError, match="ignore_eos"):
        SamplingParams(structured_outputs={"regex": "a"}, ignore_eos=True)  # type: ignore[arg-type]
