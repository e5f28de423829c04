"""Models and tokenizers by name: the Hugging Face cache, else the hub. Safetensors only; nothing fetched is ever executed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from pagedcore.errors import ModelSourceError
from pagedcore.models.progress import say

TOKENIZER_PATTERNS = ("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
WEIGHT_PATTERNS = ("*.safetensors",)
_IGNORED_PATTERNS = ("consolidated*.safetensors", "*/*.safetensors", "*/*.json", "*/*.model")
"""Second copies of the weights in other layouts, and what lies in sub-folders beside chat templates."""


def is_offline() -> bool:
    """`HF_HUB_OFFLINE` (or `TRANSFORMERS_OFFLINE`) is set."""
    values = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value.upper() in ("1", "ON", "YES", "TRUE") for value in values)


def find_or_fetch(
    name: str, patterns: tuple[str, ...], is_complete: Callable[[Path], bool], *, revision: str | None, download_dir: str | None
) -> Path:
    """The snapshot folder of a hub repository: a complete cached one is taken as it is, without asking the hub.

    Raises `ModelSourceError` saying what to do.
    """
    cached, lacks_files = _cached_snapshot(name, patterns, revision, download_dir)
    if cached is not None and is_complete(cached) and (is_offline() or not lacks_files):
        return cached
    if is_offline():
        state = "is not" if cached is None else "is only in part"
        raise ModelSourceError(
            f"{name!r}{_at(revision)} {state} in the Hugging Face cache{_in(download_dir)} and HF_HUB_OFFLINE forbids to fetch it; "
            "unset HF_HUB_OFFLINE, or pass model= a local folder."
        )
    say(f"{name}{_at(revision)} is not in the cache{_in(download_dir)}: fetching it from {_endpoint()}.")
    with _readable_errors(name, revision):
        return _snapshot(name, patterns, revision, download_dir, local_only=False)


def _cached_snapshot(name: str, patterns: tuple[str, ...], revision: str | None, download_dir: str | None) -> tuple[Path | None, bool]:
    """The snapshot folder in the cache, if there is one, and whether it is known to lack files that match the patterns."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return _snapshot(name, patterns, revision, download_dir, local_only=True), False
    except LocalEntryNotFoundError as error:
        partial = getattr(error, "snapshot_path", None)  # newer releases say where the part is
        return (None if partial is None else Path(partial)), True


def _snapshot(name: str, patterns: tuple[str, ...], revision: str | None, download_dir: str | None, *, local_only: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        folder = snapshot_download(
            name,
            revision=revision,
            cache_dir=download_dir,
            local_files_only=local_only,
            allow_patterns=list(patterns),
            ignore_patterns=list(_IGNORED_PATTERNS),
            endpoint=os.environ.get("HF_ENDPOINT") or None,
        )
    except HFValidationError as error:
        raise ModelSourceError(f"{name!r} is neither a local folder nor a name on the hub: {error}") from error
    return Path(folder)


@contextmanager
def _readable_errors(name: str, revision: str | None) -> Iterator[None]:
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    # The base class belongs to the HTTP library that huggingface_hub was built on, which has changed over its releases.
    transport_error: type[Exception] = cast("type[Exception]", HfHubHTTPError.__mro__[1])
    try:
        yield
    except GatedRepoError as error:
        raise ModelSourceError(f"{name!r} is gated: accept its terms at {_endpoint()}/{name} and set HF_TOKEN to your token.") from error
    except RepositoryNotFoundError as error:
        raise ModelSourceError(
            f"{name!r} is neither a local folder nor a repository that {_endpoint()} shows us; check the spelling, "
            "and set HF_TOKEN to a token that may read it if it is private."
        ) from error
    except RevisionNotFoundError as error:
        raise ModelSourceError(f"{name!r} has no revision {revision!r}; set revision= to one of its branches, tags or commits.") from error
    except HfHubHTTPError as error:
        raise ModelSourceError(f"{_endpoint()} refused to give {name!r}: {_status(error)}. {_token_hint(error)}") from error
    except (transport_error, OSError) as error:
        raise ModelSourceError(
            f"{name!r}{_at(revision)} could not be fetched from {_endpoint()} ({type(error).__name__}: {_first_line(error)}); "
            "check the network and HF_ENDPOINT, or pass model= a local folder."
        ) from error


def _status(error: Exception) -> str:
    response = getattr(error, "response", None)
    return _first_line(error) if response is None else f"HTTP {response.status_code}"


def _token_hint(error: Exception) -> str:
    response = getattr(error, "response", None)
    if response is not None and response.status_code in (401, 403):
        return "Set HF_TOKEN to a token that may read it."
    return "Try again later, or pass model= a local folder."


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no details"])[0]


def _endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def _at(revision: str | None) -> str:
    return "" if revision is None else f" at revision {revision!r}"


def _in(download_dir: str | None) -> str:
    return "" if download_dir is None else f" {download_dir}"
