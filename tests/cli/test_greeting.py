"""What `pagedcore serve` prints."""

from __future__ import annotations

import pytest

from pagedcore.commands.greeting import greeting
from pagedcore.http.address import announcement, base_url


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::1", "http://[::1]:8000"),
        ("box", "http://box:8000"),
    ],
)
def test_the_address_to_type(host: str, url: str) -> None:
    assert base_url(host, 8000) == url


def test_one_line_says_what_is_served_and_where_operators_look() -> None:
    served = "pagedcore serves m at http://127.0.0.1:1/v1."
    operators = " Live page: http://127.0.0.1:1/ui, metrics: http://127.0.0.1:1/metrics."
    assert announcement("0.0.0.0", 1, "m", has_operator_routes=True) == f"{served}{operators} Stop: Ctrl-C"
    assert announcement("0.0.0.0", 1, "m", has_operator_routes=False) == f"{served} Stop: Ctrl-C"


def test_the_greeting_asks_for_a_key_only_where_there_is_one() -> None:
    assert "PAGEDCORE_API_KEY" not in greeting("h", 1, "m", needs_key=False)
    assert "Authorization: Bearer $PAGEDCORE_API_KEY" in greeting("h", 1, "m", needs_key=True)


def test_the_greeting_says_where_the_live_page_is() -> None:
    assert "Live page: http://h:1/ui " in greeting("h", 1, "m", needs_key=False)
