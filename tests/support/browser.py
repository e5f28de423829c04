"""Debian's Chromium, headless, for tests of the live page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome")

# Nothing leaves the machine, and nothing asks for a GPU or a sandbox that a container does not have.
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


def chromium_path() -> str | None:
    """The browser that CHROMIUM names, or one on PATH."""
    return os.environ.get("CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def open_browser() -> Iterator[Browser]:
    """A browser until the block ends. Skips the test where none is installed."""
    path = chromium_path()
    if path is None:
        pytest.skip("no Chromium is installed; `apt-get install chromium`, or name one in CHROMIUM")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()
