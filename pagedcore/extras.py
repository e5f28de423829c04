"""The optional dependencies: which there are, what of them is missing, and the command that installs them."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packaging.requirements import Requirement

NAME = "pagedcore"
PACKAGE_ROOT = Path(__file__).parents[1]

Extras = Mapping[str, tuple[str, ...]]
"""Extra -> the distributions that it brings on this machine."""


def pip_command(extra: str) -> str:
    """How this installation gets an extra, for messages."""
    return f"pip install {_target(extra, checkout(), _direct_url(), Path.cwd())}"


def extras() -> Extras:
    """Those of the checkout that is imported, else those of the installed package."""
    by_extra = _requirements()

    def brought(extra: str) -> Iterator[str]:
        for requirement in by_extra[extra]:
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
                continue
            if requirement.name != NAME:
                yield requirement.name
                continue
            for inner in by_extra:
                if inner in requirement.extras:
                    yield from brought(inner)

    return {extra: tuple(dict.fromkeys(brought(extra))) for extra in by_extra}


def missing(distributions: Iterable[str]) -> list[str]:
    """Those that are not installed."""
    return [name for name in distributions if version_of(name) is None]


def version_of(distribution: str) -> str | None:
    """Installed version, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def checkout() -> Path | None:
    """The folder of sources that is imported, as by `pip install -e`; None for an installed copy."""
    is_source = _project(PACKAGE_ROOT / "pyproject.toml").get("name") == NAME
    return PACKAGE_ROOT if is_source else None


def _requirements() -> dict[str, list[Requirement]]:
    """Extra -> what it asks for, by markers: an installed copy keeps those of all extras in one list, each marked with its extra."""
    from packaging.requirements import Requirement

    folder = checkout()
    if folder is not None:
        optional = _project(folder / "pyproject.toml")["optional-dependencies"]
        return {extra: [Requirement(text) for text in texts] for extra, texts in optional.items()}
    try:
        metadata = importlib.metadata.metadata(NAME)
    except importlib.metadata.PackageNotFoundError:
        return {}
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist") or ()]
    optional_ones = [one for one in requirements if one.marker is not None and not one.marker.evaluate({"extra": ""})]
    return dict.fromkeys(metadata.get_all("Provides-Extra") or (), optional_ones)


@cache
def _project(path: Path) -> dict[str, Any]:
    import tomllib

    return dict(tomllib.loads(path.read_text(encoding="utf-8")).get("project", {})) if path.is_file() else {}


def _direct_url() -> dict[str, Any]:
    """Where pip got the installed copy, if not from an index."""
    try:
        text = importlib.metadata.distribution(NAME).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return {}
    return dict(json.loads(text)) if text else {}


def _target(extra: str, source: Path | None, direct_url: Mapping[str, Any], here: Path) -> str:
    if source is not None:
        return f"-e '{'.' if source == here else source}[{extra}]'"
    url = direct_url.get("url")
    if url is None:
        return f"'{NAME}[{extra}]'"
    vcs = direct_url.get("vcs_info")
    if vcs is not None:
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"'{NAME}[{extra}] @ {url}'"
