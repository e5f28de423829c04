"""What the live page proposes: findings, advice, whose requests wait; in a real browser, over answers made by hand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from pagedcore.advice.sentences import MIN_LOOKUPS
from pagedcore.console.page_files import FOLDER
from pagedcore.openai import build_app
from support.browser import open_browser
from support.console import make_stats
from support.fake_client import FakeClient
from support.live_server import live_server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

EVIL = '<img src="x" onerror="window.hacked=1">'


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


def row(tenant: str, waiting: int, running: int) -> dict[str, Any]:
    tokens = {"prompt_tokens": 1200, "output_tokens": 34, "ttft_p50_s": 0.25, "ttft_p99_s": None}
    return {"tenant": tenant, "num_waiting": waiting, "num_running": running, "priority": 0, **tokens}


@contextmanager
def page_of(browser: Browser, *, num_lookups: int = MIN_LOOKUPS, **facts: Any) -> Iterator[Page]:
    """The live page of one engine, which knows these facts and one piece of advice."""
    stats = make_stats(
        elapsed_s=10.0, sampled_tokens=5, miss_blocks={}, prefix_cache_hit_tokens=0, device_memory_bytes_by_kind={"kv_cache": 0},
        num_preemptions=0, **facts,
    )  # fmt: skip
    client = FakeClient()
    client.answers = {
        "stats": [stats], "blocks": [],
        "advice": [{"engine": "0", "sentences": ["Buy a larger pool."], "num_lookups": num_lookups}],
    }  # fmt: skip
    with live_server(build_app(client)) as url:
        page = browser.new_page()
        page.set_default_timeout(15_000)
        page.goto(url + "/ui")
        page.wait_for_selector("#live[data-state='live']")
        try:
            yield page
            assert page.evaluate("window.hacked") is None
        finally:
            page.close()


@pytest.mark.serve
def test_a_flood_is_shown_with_its_cure_and_the_advice_behind_it(browser: Browser) -> None:
    with page_of(browser, tenants=[row(EVIL, 20, 4), row("", 1, 0)]) as page:
        page.locator("#change-list li", has_text="Buy a larger pool.").wait_for()
        first, second = page.locator("#change-list li").all_text_contents()
        assert first.startswith(f"Tenant {EVIL} has 24 of 25 open requests")
        assert "scheduling_policy=priority" in first
        assert second == "Buy a larger pool."
        assert page.locator("#tenant-rows tr").all_inner_texts() == [
            f"{EVIL}\t20\t4\t1,200\t34\t250 ms\t–",
            "without a tenant\t1\t0\t1,200\t34\t250 ms\t–",
        ]


@pytest.mark.serve
def test_where_nothing_stands_out_and_nobody_has_a_name_there_are_no_empty_cards(browser: Browser) -> None:
    with page_of(browser, num_lookups=MIN_LOOKUPS - 1, tenants=[row("", 1, 1)]) as page:
        page.locator("#levels .level").first.wait_for()
        page.evaluate("fetch('v1/cache/advice').then((reply) => reply.json())")
        assert page.is_hidden("#change")
        assert page.is_hidden("#tenants")


@pytest.mark.serve
@pytest.mark.parametrize("width", [390, 1280])
def test_many_columns_scroll_in_their_card_and_not_the_page(browser: Browser, width: int) -> None:
    with page_of(browser, tenants=[row("a tenant with a name that is rather long", 20, 4), row("", 1, 0)]) as page:
        page.set_viewport_size({"width": width, "height": 900})
        page.locator("#tenants").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_page_knows_of_how_few_prompts_nothing_is_concluded() -> None:
    (number,) = re.findall(r"const MIN_LOOKUPS = (\d+);", (FOLDER / "change.js").read_text(encoding="utf-8"))
    assert int(number) == MIN_LOOKUPS
