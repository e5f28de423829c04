"""Text can be read on what it stands on, in light and in dark (WCAG 2 AA: 4.5 to 1; 3 to 1 for marks)."""

from __future__ import annotations

import re

import pytest

from pagedcore.console.page_files import FOLDER

TEXT = [
    *((ink, ground) for ink in ("ink", "ink-2", "ink-3", "accent") for ground in ("surface", "plane", "raised")),
    ("good", "good-soft"), ("bad", "bad-soft"), ("idle", "idle-soft"), ("accent", "accent-soft"), ("surface", "accent"), ("plane", "ink"),
]  # fmt: skip
MARKS = [(f"s{number}", "surface") for number in range(1, 8)] + [("edge", "surface"), ("focus", "plane")]


def variables(scheme: str) -> dict[str, str]:
    """Custom properties of a scheme: those of dark replace those of light."""
    css = (FOLDER / "style.css").read_text(encoding="utf-8")
    light, dark = re.findall(r":root \{(.*?)\}", css, flags=re.DOTALL)
    found = dict(re.findall(r"--([\w-]+):\s*(#[0-9a-fA-F]{6})", light))
    return found if scheme == "light" else {**found, **dict(re.findall(r"--([\w-]+):\s*(#[0-9a-fA-F]{6})", dark))}


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a: str, b: str) -> float:
    darker, lighter = sorted((luminance(a), luminance(b)))
    return (lighter + 0.05) / (darker + 0.05)


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_pair_of_the_page_has_its_contrast(scheme: str) -> None:
    colour = variables(scheme)
    weak = {
        f"{front} on {ground}": round(contrast(colour[front], colour[ground]), 2)
        for pairs, least in ((TEXT, 4.5), (MARKS, 3.0))
        for front, ground in pairs
        if contrast(colour[front], colour[ground]) < least
    }
    assert weak == {}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_ramps_of_heat_go_one_way(scheme: str) -> None:
    colour = variables(scheme)
    for state in "ac":
        steps = [luminance(colour[f"{state}{heat}"]) for heat in range(5)]
        assert steps == sorted(steps, reverse=scheme == "light")
