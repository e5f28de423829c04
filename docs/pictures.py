"""Makes the pictures of docs/observability.md: plays the stories of examples/slow_service and photographs the live page meanwhile.

`python docs/pictures.py [name ...]`, with Chromium installed; some minutes. Numbers in the pictures are those of the machine.
"""

from __future__ import annotations

import importlib
import io
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).parent.parent
FOLDER = Path(__file__).parent / "images"
MAX_BYTES = 60_000
NUM_COLOURS = (255, 128, 64, 32)
"""The first that keeps a picture below `MAX_BYTES`."""

MOMENT_TIMEOUT_S = 240.0
SETTLE_MS = 2400
"""The page draws once a second; charts and advice follow."""


@dataclass(frozen=True, slots=True)
class Shot:
    """One picture: a scene, what of its page, and when (None: when it has been played)."""

    name: str
    story: str
    scene: Literal["before", "after"]
    tab: Literal["now", "requests", "advice"] = "now"
    until: str | None = None
    """The picture begins at the top and ends below this element."""
    request: str | None = None
    """A search that finds the one request to open."""
    moment: Callable[[Any], bool] | None = None
    width: int = 1080
    height: int = 1600
    scheme: Literal["light", "dark"] = "light"


def _some_reports_are_done(stage: Any) -> bool:
    stats = stage.llm.stats()
    return bool(stats.num_finished["completed"] >= 2 and stats.num_waiting)


def _engine_is_done(stage: Any) -> bool:
    return (stage.llm.engine.history.find("letter") or {}).get("e2e_ms") is not None


SHOTS = (
    Shot("ui-now", "small_pool", "after", until="#blocks-legend"),
    Shot("timestamp-before", "timestamp_first", "before", until="#hit-facts"),
    Shot("timestamp-request", "timestamp_first", "before", tab="requests", request="", height=1010),
    Shot("timestamp-after", "timestamp_first", "after", until="#hit-facts"),
    Shot("pool-before", "small_pool", "before", tab="advice", until=".curve"),
    Shot("pool-after", "small_pool", "after", until="#hit-facts"),
    Shot("flood-before", "flooding_tenant", "before", until="#tenants", moment=_some_reports_are_done),
    Shot("flood-after", "flooding_tenant", "after", until="#tenants", moment=_some_reports_are_done),
    Shot("prefill-before", "long_prefill", "before", until="#tokens-facts"),
    Shot("prefill-after", "long_prefill", "after", until="#tokens-facts"),
    Shot("reader-before", "slow_reader", "before", tab="requests", request="letter", moment=_engine_is_done, height=640),
    Shot("reader-after", "slow_reader", "after", tab="requests", request="letter", height=640),
    Shot("dark", "small_pool", "before", until="#hit-facts", scheme="dark"),
    Shot("narrow", "flooding_tenant", "before", width=390, height=1100, moment=_some_reports_are_done),
)


def main(names: Sequence[str]) -> None:
    """Make the pictures of these names, or all."""
    sys.path[:0] = [str(ROOT / folder) for folder in ("examples/slow_service", "tests", "adapters", "kernels", ".")]
    from support.browser import open_browser

    with open_browser() as browser:
        for story, scene in dict.fromkeys((shot.story, shot.scene) for shot in SHOTS if not names or shot.name in names):
            _photograph(
                browser,
                story,
                scene,
                [shot for shot in SHOTS if (shot.story, shot.scene) == (story, scene) and (not names or shot.name in names)],
            )


def _photograph(browser: Browser, story: str, scene_name: str, shots: Sequence[Shot]) -> None:
    """Play one scene with a page a shot open, as a person would look."""
    stage_module = importlib.import_module("stage")
    scene = getattr(importlib.import_module(story).STORY, scene_name)
    with stage_module.Stage(scene) as stage:
        opened = [(shot, _open(browser, stage.url, shot)) for shot in shots]
        with _played(scene, stage) as is_over:
            for shot, page in sorted(opened, key=lambda pair: pair[0].moment is None):
                _wait(page, is_over if shot.moment is None else partial(_is_moment, shot.moment, stage, is_over))
                _save(shot, page)


def _is_moment(moment: Callable[[Any], bool], stage: Any, is_over: Callable[[], bool]) -> bool:
    return moment(stage) or is_over()


@contextmanager
def _played(scene: Any, stage: Any) -> Iterator[Callable[[], bool]]:
    """Clients in a thread; what they saw is printed, for the tables beside the pictures."""
    thread = threading.Thread(target=lambda: sys.stdout.write(f"{scene.name}: {scene.play(stage)}\n"), name="clients")
    thread.start()
    yield lambda: not thread.is_alive()
    thread.join()


def _open(browser: Browser, url: str, shot: Shot) -> Page:
    context = browser.new_context(viewport={"width": shot.width, "height": shot.height}, color_scheme=shot.scheme, reduced_motion="reduce")
    page = context.new_page()
    page.goto(f"{url}/ui#{shot.tab}")
    page.wait_for_selector("#live[data-state='live']")
    return page


def _wait(page: Page, condition: Callable[[], bool]) -> None:
    """Poll, and let the page go on meanwhile."""
    deadline = time.monotonic() + MOMENT_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"The moment did not come within {MOMENT_TIMEOUT_S:g} s.")
        page.wait_for_timeout(50)


def _save(shot: Shot, page: Page) -> None:
    page.click(f"#tab-{shot.tab}")  # asks for the advice anew
    page.wait_for_timeout(SETTLE_MS)
    if shot.request is not None:
        page.fill("#search", shot.request)
        page.wait_for_timeout(SETTLE_MS)
        page.locator("tr[data-id] button").first.click()
        page.wait_for_selector("#detail[open] .events li")
    path = FOLDER / f"{shot.name}.png"
    path.write_bytes(_small(page.screenshot(clip=_clip(shot, page))))
    sys.stdout.write(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes\n")
    page.context.close()


def _clip(shot: Shot, page: Page) -> Any:
    height = shot.height
    if shot.until is not None:
        box = page.locator(shot.until).bounding_box()
        height = min(int(box["y"] + box["height"]) + 28, height) if box is not None else height
    return {"x": 0, "y": 0, "width": shot.width, "height": height}


def _small(png: bytes) -> bytes:
    """The same picture in its most frequent colours, few but strong ones among them: areas keep theirs, edges get the nearest."""
    from PIL import Image

    picture = Image.open(io.BytesIO(png)).convert("RGB")
    colours = sorted(picture.getcolors(picture.width * picture.height) or [], key=_weight, reverse=True)
    for number in NUM_COLOURS:
        palette, out = Image.new("P", (1, 1)), io.BytesIO()
        palette.putpalette([part for _, colour in colours[:number] for part in colour])  # type: ignore[attr-defined]
        picture.quantize(palette=palette, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
        if out.tell() <= MAX_BYTES:
            break
    return out.getvalue()


def _weight(counted: Any) -> int:
    number, (red, green, blue) = counted
    return int(number * (1 + max(red, green, blue) - min(red, green, blue)))


if __name__ == "__main__":
    main(sys.argv[1:])
