"""The optional dependencies: which there are, what of them is missing, and the command that installs them."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

NAME = "pagedcore"
PACKAGE_ROOT = Path(__file__).parents[1]

_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)\s*(?:\[(?P<extras>[^\]]*)\])?[^;]*(?:;(?P<marker>.*))?")
_EXTRA = re.compile(r"""extra\s*==\s*["']([\w-]+)["']""")

Extras = Mapping[str, tuple[str, ...]]
"""Extra -> the distributions that it brings on every machine."""


def pip_command(extra: str) -> str:
    """How this installation gets an extra, for messages."""
    return f"pip install {_target(extra, checkout(), _direct_url(), Path.cwd())}"


def extras() -> Extras:
    """Those of the checkout that is imported, else those of the installed package."""
    folder = checkout()
    if folder is not None:
        optional = _project(folder / "pyproject.toml")["optional-dependencies"]
        return _resolved({extra: [_REQUIREMENT.match(text) for text in texts] for extra, texts in optional.items()})
    try:
        texts = importlib.metadata.requires(NAME) or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    by_extra: dict[str, list[re.Match[str] | None]] = {}
    for text in texts:
        found = _EXTRA.search(text)
        if found is not None:
            by_extra.setdefault(found[1], []).append(_REQUIREMENT.match(_EXTRA.sub("", text)))
    return _resolved(by_extra)


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


def _resolved(requirements: Mapping[str, list[re.Match[str] | None]]) -> Extras:
    """With `pagedcore[a,b]` replaced by what a and b bring, and without what only some machines need."""

    def brought(extra: str) -> Iterable[str]:
        for found in requirements.get(extra, ()):
            if found is None or (found["marker"] or "").strip(" ()"):
                continue
            if found["name"] != NAME:
                yield found["name"]
                continue
            for inner in (found["extras"] or "").split(","):
                yield from brought(inner.strip())

    return {extra: tuple(dict.fromkeys(brought(extra))) for extra in requirements}
