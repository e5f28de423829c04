"""The scanner agrees with Python's json about what is JSON and where it ends."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedcore.tools.json_scan import JsonScanner, Step

VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=5), children, max_size=4),
    max_leaves=12,
)


def scan(text: str) -> tuple[Step, int]:
    """The last step, and how many characters it took to get there."""
    scanner = JsonScanner()
    for position, char in enumerate(text, start=1):
        step = scanner.push(char)
        if step is not Step.MORE:
            return step, position
    return Step.MORE, len(text)


@given(VALUES, st.sampled_from([None, 1, "\t"]), st.booleans())
def test_a_value_ends_at_its_last_character(value: Any, indent: Any, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        assert scan(text) == (Step.MORE, len(text))
        assert scan(text + ",") == (Step.PAST, len(text) + 1)
    else:
        assert scan(text + "x") == (Step.LAST, len(text))


@given(VALUES, st.data())
def test_a_wrong_character_is_wrong_at_once(value: Any, data: Any) -> None:
    text = json.dumps([value])
    at = data.draw(st.integers(1, len(text) - 1))
    changed = text[:at] + data.draw(st.sampled_from('{}[]",:x0-.\n\\')) + text[at + 1 :]
    step, position = scan(changed)
    try:
        end = json.JSONDecoder().raw_decode(changed)[1]
    except ValueError:
        assert step is not Step.LAST
        assert step is Step.MORE or position > at
    else:
        assert (step, position) == (Step.LAST, end)


@pytest.mark.parametrize(
    "text",
    ["01,", "1.,", "-,", "1e,", "+1", "tru ", "nul1", '"\\x', '"\\u12g', '"\n', "{1", "{,", "[,", "[1,]", "{}}"[1:], '{"a" 1', '{"a":}'],
)
def test_what_is_no_json_is_wrong(text: str) -> None:
    assert scan(text)[0] is Step.WRONG
