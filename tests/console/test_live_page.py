"""The live page in a real browser, over a real engine with a fake runner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from pagedcore import SamplingParams
from pagedcore.async_engine import AsyncEngine
from pagedcore.client import RequestContext
from pagedcore.console.feed import Feed
from pagedcore.console.indicators import Targets
from pagedcore.openai import ServerSettings, build_app
from support.browser import open_browser
from support.engine_builder import make_engine
from support.live_server import live_server
from support.served import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.serve

STEM = list(range(1, 25))
EVIL = '<img src="x" onerror="window.hacked=1">'
EVIL_ID = "<script>window.hacked=1</script>"


class Words:
    """A tokenizer that writes token 7 as word7."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
        return " ".join(f"word{token_id}" for token_id in token_ids)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    """Three requests have ended: the second left the first one at token 29, the third is of a tenant with an evil name."""
    engine = make_engine().engine
    engine._inspector._text = Words()  # type: ignore[assignment]
    for name, prompt, tenant in [("first", range(25, 35), None), ("second", [*range(25, 30), *range(1, 11)], None), (EVIL_ID, [3], EVIL)]:
        list(engine.generate_sync([*STEM, *prompt], SamplingParams(max_tokens=3), name, context=RequestContext(tenant=tenant)))
    yield engine
    engine.close_sync()


@pytest.fixture(scope="module")
def url(engine: AsyncEngine) -> Iterator[str]:
    with live_server(build_app(engine)) as url:
        yield url


@contextmanager
def opened(browser: Browser, url: str, *, width: int = 1280, scheme: Any = "light") -> Iterator[Page]:
    """The page in a context of its own. Any error in its console fails the test."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on(
        "console",
        lambda message: faults.append(message.text) if message.type == "error" and "Failed to load resource" not in message.text else None,
    )
    page.set_default_timeout(15_000)
    page.goto(url + "/ui")
    try:
        yield page
        assert faults == []
        assert page.evaluate("window.hacked") is None
    finally:
        context.close()


def ask_as_a_tenant(engine: AsyncEngine) -> None:
    """The page has a table of those who asked in the last minute."""
    list(engine.generate_sync(STEM, SamplingParams(max_tokens=3), context=RequestContext(tenant="shop")))


def is_live(page: Page) -> None:
    page.wait_for_selector("#live[data-state='live']")


def test_now_shows_the_numbers_of_the_engine(browser: Browser, url: str, engine: AsyncEngine) -> None:
    with opened(browser, url) as page:
        is_live(page)
        stats = engine.stats()
        assert page.text_content("#model") == "fake"
        assert page.locator(".indicator").count() == 5
        prefix = page.locator("#levels .level").nth(1).text_content()
        assert prefix is not None
        assert f"{stats.hit_rate('prefix') * 100:.1f} % of ideal {stats.ideal_hit_rate * 100:.1f} %" in prefix
        label = page.get_attribute("#blocks", "aria-label")
        assert label == f"0 active, {stats.num_cached_blocks} cached and {stats.num_free_blocks} free of 256 blocks"
        assert page.evaluate("document.getElementById('blocks').width") > 200


def test_the_block_map_is_painted_by_state(browser: Browser, url: str) -> None:
    with opened(browser, url) as page:
        is_live(page)
        colours = page.evaluate(
            """() => { const c = document.getElementById('blocks'), p = c.getContext('2d'), found = new Set();
            for (let x = 5; x < c.width; x += 13) found.add(p.getImageData(x, 5, 1, 1).data.join());
            return [...found]; }"""
        )
        assert len(colours) >= 2  # cached beside free


def test_names_are_text_and_never_markup(browser: Browser, url: str) -> None:
    with opened(browser, url) as page:
        page.click("#tab-requests")
        row = page.locator("tr[data-id]", has_text=EVIL_ID)
        assert row.locator(".sub").text_content() == EVIL
        row.locator("button").click()
        page.wait_for_selector("#detail[open] .events li")
        assert page.text_content("#detail-title") == EVIL_ID
        assert page.locator("main img, dialog img, main script, dialog script").count() == 0


def test_a_long_name_leaves_the_numbers_beside_it_in_sight(browser: Browser) -> None:
    engine = make_engine().engine
    try:
        list(engine.generate_sync(STEM, SamplingParams(max_tokens=1), context=RequestContext(tenant="x" * 300)))
        with live_server(build_app(engine)) as url, opened(browser, url) as page:
            page.wait_for_selector("#tenant-rows tr")
            last, card = page.evaluate(  # at once: the rows are made anew each second
                """() => ['#tenant-rows tr:last-child td:last-child', '#tenants']
                .map((one) => document.querySelector(one).getBoundingClientRect().right)"""
            )
            assert 0 < last <= card
            assert page.locator("#tenant-rows th").get_attribute("title") == "x" * 300
    finally:
        engine.close_sync()


def test_a_request_is_found_and_opened_by_keyboard_and_shows_its_timeline_and_its_miss_but_no_text(browser: Browser, url: str) -> None:
    with opened(browser, url) as page:
        page.focus("#tab-now")
        page.keyboard.press("ArrowRight")
        assert page.get_attribute("#tab-requests", "aria-selected") == "true"
        page.wait_for_selector("tr[data-id='first']")  # until the rows are there, none of them is missing
        page.fill("#search", "SECOND")
        page.locator("tr[data-id='first']").wait_for(state="detached")
        assert page.locator("tr[data-id]").count() == 1
        page.focus("tr[data-id] button")
        page.keyboard.press("Enter")
        page.wait_for_selector("#detail[open] .events li")
        events = page.locator("#detail .events li").all_text_contents()
        names = ("arrived", "queued", "admitted", "prefill chunk", "first token", "finished")
        assert [name for name, event in zip(names, events, strict=True) if name not in event] == []
        body = page.text_content("#detail-body") or ""
        assert "24 of 39 prompt tokens came from the cache." in body
        assert "The nearest cached prompt is the same up to token 29." in body
        assert "word" not in body
        page.keyboard.press("Escape")
        assert page.locator("#detail[open]").count() == 0


def test_text_is_shown_where_the_server_says_so(browser: Browser, engine: AsyncEngine) -> None:
    with live_server(build_app(engine, ServerSettings(ui_show_text=True))) as url, opened(browser, url) as page:
        page.click("#tab-requests")
        page.locator("tr[data-id]", has_text="second").locator("button").click()
        page.wait_for_selector("#detail mark")
        assert page.text_content("#detail mark") == " ".join(f"word{token}" for token in range(1, 11))


def test_a_refresh_leaves_rows_and_focus_where_they_are(browser: Browser, url: str, engine: AsyncEngine) -> None:
    with opened(browser, url) as page:
        page.click("#tab-requests")
        page.focus("tr[data-id='first'] button")
        list(engine.generate_sync(STEM, SamplingParams(max_tokens=1), "newer"))
        page.wait_for_selector("tr[data-id='newer']")
        assert page.evaluate("document.activeElement.textContent") == "first"
        assert page.locator("tr[data-id]").first.get_attribute("data-id") == "newer"


def test_a_search_that_finds_nothing_takes_away_its_own_table_and_no_other(browser: Browser, url: str, engine: AsyncEngine) -> None:
    ask_as_a_tenant(engine)
    with opened(browser, url) as page:
        page.wait_for_selector("#tenant-rows tr")
        page.click("#tab-requests")
        page.wait_for_selector("tr[data-id='first']")
        page.fill("#search", "nobody is called so")
        page.wait_for_selector("#requests-table", state="hidden")
        assert page.text_content("#requests-count") == "0 requests found"
        page.click("#tab-now")
        assert page.is_visible("#tenant-rows tr")


def test_times_are_written_in_the_unit_that_they_round_to(browser: Browser, url: str) -> None:
    with opened(browser, url) as page:
        given = [0.0004, 0.25, 0.9997, 9.5, 59.97, 119.7, 3599.8, 7199.0]
        shown = page.evaluate("async (given) => given.map((await import('/ui/format.js')).seconds)", given)
        assert shown == ["0.40 ms", "250 ms", "1.00 s", "9.50 s", "1 min 0 s", "2 min 0 s", "1 h 0 min", "2 h 0 min"]


def test_advice_draws_the_curve_and_says_its_numbers(browser: Browser, url: str) -> None:
    with opened(browser, url) as page:
        page.click("#tab-advice")
        page.wait_for_selector("#advice-body .curve polyline", state="attached")  # a flat one has no height
        assert page.locator("#advice-body .sentences li").count() >= 1
        assert page.locator("#advice-body details table tbody tr").count() == page.locator("#advice-body polyline").count()
        page.click("#advice-body summary")
        page.evaluate("document.querySelector('#advice-body article').id = 'before-the-refresh'")
        page.click("#tab-advice")
        page.wait_for_selector("#before-the-refresh", state="detached")
        assert page.is_visible("#advice-body details table")


def test_a_costly_prefix_opens_the_request_that_computed_it_again(browser: Browser) -> None:
    engine = make_engine(num_blocks=8, max_model_len=64).engine
    try:
        for name, first in [("one", 1), ("two", 6), ("three", 11), ("one-again", 1)]:
            list(engine.generate_sync([*range(first, first + 30)], SamplingParams(max_tokens=3), name))
        with live_server(build_app(engine)) as url, opened(browser, url, width=390) as page:
            page.click("#tab-advice")
            page.get_by_role("button", name="one-again").click()
            page.wait_for_selector("#detail[open] .events li")
            assert page.text_content("#detail-title") == "one-again"
            assert "dropped to make room" in (page.text_content("#detail-body") or "")
    finally:
        engine.close_sync()


def test_a_paused_or_hidden_page_costs_nothing_and_comes_back(
    browser: Browser, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    feeds: list[Feed] = []

    class Remembered(Feed):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            feeds.append(self)

    monkeypatch.setattr("pagedcore.console.routes.Feed", Remembered)
    app = build_app(engine)
    (feed,) = feeds
    with live_server(app) as url, opened(browser, url) as page:
        is_live(page)
        assert feed.is_running
        page.click("#pause")
        assert page.get_attribute("#pause", "aria-pressed") == "true"
        wait_until(lambda: not feed.is_running, 60, "a feed without viewers")
        page.click("#pause")
        is_live(page)
        page.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        wait_until(lambda: not feed.is_running, 60, "a feed that nobody looks at")
        page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
        is_live(page)


def test_a_server_with_a_key_is_opened_by_it(browser: Browser, engine: AsyncEngine) -> None:
    with live_server(build_app(engine, ServerSettings(api_keys=("sesame",)))) as url, opened(browser, url) as page:
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-error:not([hidden])")
        assert "missing or wrong" in (page.text_content("#key-error") or "")
        page.fill("#key", "sesame")
        page.keyboard.press("Enter")
        is_live(page)
        page.click("#tab-requests")
        page.wait_for_selector("tr[data-id]")
        assert "sesame" not in page.url
        assert page.evaluate("localStorage.length") == 0


def test_a_server_that_ends_is_told_and_found_again(browser: Browser, engine: AsyncEngine) -> None:
    with live_server(build_app(engine)) as url, opened(browser, url) as page:
        is_live(page)
        page.route("**/ui/feed", lambda route: route.fulfill(status=503, json={"error": {"message": "The engine is closed."}}))
        page.evaluate("document.getElementById('pause').click(); document.getElementById('pause').click()")
        page.locator("#banner", has_text="The engine is closed.").wait_for()
        page.unroute("**/ui/feed")
        is_live(page)
        assert page.is_hidden("#banner")


class Pair:
    """Two engines behind one client, as LitServe's workers are."""

    def __init__(self, first: AsyncEngine, second: AsyncEngine) -> None:
        self.engines = (first, second)
        self.generate, self.info = first.generate, first.info

    async def inspect(self, question: str, **arguments: Any) -> list[dict[str, Any]]:
        return [{**(await one.inspect(question, **arguments))[0], "engine": str(name)} for name, one in enumerate(self.engines)]


def test_each_of_two_engines_can_be_looked_at(browser: Browser, engine: AsyncEngine) -> None:
    other = make_engine(num_blocks=64, max_model_len=64).engine
    try:
        with live_server(build_app(Pair(engine, other))) as url, opened(browser, url) as page:  # type: ignore[arg-type]
            is_live(page)
            assert "of 256 blocks" in (page.get_attribute("#blocks", "aria-label") or "")
            page.select_option("#engine", "1")
            assert "of 64 blocks" in (page.get_attribute("#blocks", "aria-label") or "")
            page.set_viewport_size({"width": 390, "height": 900})
            name = page.locator(".brand .name")
            assert name.evaluate("one => one.scrollWidth <= one.clientWidth")
            page.click("#tab-advice")
            page.wait_for_selector("#advice-body .card")
            gaps = page.evaluate(
                """() => [...document.querySelectorAll('#advice-body .card')].map((card) => card.getBoundingClientRect())
                .map((box, at, all) => at ? box.top - all[at - 1].bottom : 16)"""
            )
            assert min(gaps) >= 16
    finally:
        other.close_sync()


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_no_width_makes_the_page_scroll_sideways(browser: Browser, url: str, width: int) -> None:
    with opened(browser, url, width=width) as page:
        is_live(page)
        for tab in ("now", "requests", "advice"):
            page.click(f"#tab-{tab}")
            page.wait_for_selector({"now": ".indicator", "requests": "tr[data-id]", "advice": "#advice-body .card"}[tab])
            assert page.evaluate("document.documentElement.scrollWidth") <= width, tab


def test_on_a_phone_nothing_sticks_out_of_its_card(browser: Browser, engine: AsyncEngine) -> None:
    ask_as_a_tenant(engine)
    settings = ServerSettings(targets=Targets(ttft_p99_s=1e-9, device_busy=1.0))
    with live_server(build_app(engine, settings)) as url, opened(browser, url, width=390) as page:
        page.wait_for_selector(".indicator .next")
        page.wait_for_selector("#tenant-rows tr")
        outside = page.evaluate(
            """() => [...document.querySelectorAll('.card, .indicator')].filter((card) => card.offsetParent !== null).flatMap((card) => {
            const right = card.getBoundingClientRect().right + 0.5;
            const isOut = (one) => one.getBoundingClientRect().right > right || one.scrollWidth > card.clientWidth;
            return [...card.querySelectorAll('*')].filter(isOut).map((one) => one.className + one.textContent.slice(0, 40)); })"""
        )
        assert outside == []
        times = page.locator("#tenant-rows td[data-label='First token p50']").first
        assert "First token p50" in times.evaluate("cell => getComputedStyle(cell, '::before').content")


def test_dark_and_light_are_two_designs(browser: Browser, url: str) -> None:
    shades = {}
    for scheme in ("light", "dark"):
        with opened(browser, url, scheme=scheme) as page:
            shades[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert shades["light"] != shades["dark"]
