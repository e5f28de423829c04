"""From what the user named as `model` and `tokenizer` to folders on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pagedcore.config import EngineConfig
from pagedcore.errors import ConfigError, ModelSourceError
from pagedcore.models.embedded import EMBEDDED_NAME, ensure_embedded_model
from pagedcore.models.hub import TOKENIZER_PATTERNS, WEIGHT_PATTERNS, find_or_fetch
from pagedcore.models.progress import Progress
from pagedcore.models.safetensors_index import INDEX_FILE, read_weight_map

_TOKENIZER_FILES = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.json", "vocab.txt")
_PICKLE_FILES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """Local folders that hold everything the loader and the tokenizer need."""

    model_dir: Path
    name: str
    """What was asked for: the default served name."""
    tokenizer_dir: Path


def resolve_model(config: EngineConfig, *, progress: Progress | None = None) -> ResolvedModel:
    """Find, fetch or make the files of a config's model and tokenizer.

    `progress(what, done, total)` follows the making of the embedded model, in place of a bar on stderr; the hub library shows its own bars.
    Raises `ModelSourceError` saying what to do.
    """
    model_dir = _model_dir(config, progress)
    tokenizer_dir = model_dir if config.tokenizer in (None, config.model) else _tokenizer_dir(str(config.tokenizer), config, progress)
    return ResolvedModel(model_dir=model_dir, name=config.model or EMBEDDED_NAME, tokenizer_dir=tokenizer_dir)


def _model_dir(config: EngineConfig, progress: Progress | None) -> Path:
    needs_weights = config.load_format != "dummy"
    local = _local_folder(config.model, "model")
    if config.model in (None, EMBEDDED_NAME) and local is None:
        _refuse_revision(config)
        return ensure_embedded_model(progress)
    if local is not None:
        _refuse_revision(config)
        _require_model_files(local, str(config.model), needs_weights)
        return local
    patterns = (*TOKENIZER_PATTERNS, *(WEIGHT_PATTERNS if needs_weights else ()))
    folder = find_or_fetch(
        str(config.model),
        patterns,
        lambda snapshot: _missing_model_file(snapshot, needs_weights) is None,
        revision=config.revision,
        download_dir=config.download_dir,
    )
    _require_model_files(folder, str(config.model), needs_weights)
    return folder


def _tokenizer_dir(tokenizer: str, config: EngineConfig, progress: Progress | None) -> Path:
    local = _local_folder(tokenizer, "tokenizer")
    if local is not None:
        return local
    if tokenizer == EMBEDDED_NAME:
        return ensure_embedded_model(progress)
    folder = find_or_fetch(tokenizer, TOKENIZER_PATTERNS, _has_tokenizer, revision=None, download_dir=config.download_dir)
    if not _has_tokenizer(folder):
        raise ModelSourceError(f"{tokenizer!r} holds no tokenizer files ({', '.join(_TOKENIZER_FILES)}); set tokenizer= to one that does.")
    return folder


def _local_folder(name: str | None, setting: str) -> Path | None:
    """The folder that a name means, or None for a hub name. Raises `ModelSourceError` for a path to something else."""
    if name is None:
        return None
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise ModelSourceError(f"{setting} is the file {name!r}; pass the folder that holds config.json and *.safetensors.")
    if path.is_absolute() or name.startswith((".", "~")) or "\\" in name or name.count("/") > 1:
        raise ModelSourceError(f"{setting} is the path {name!r} and there is no such folder.")
    return None


def _refuse_revision(config: EngineConfig) -> None:
    """A folder has one state; only the default branch's name is accepted for it."""
    if config.revision not in (None, "main"):
        raise ConfigError(f"revision is {config.revision!r} and chooses a state of a hub model; remove it for a local or embedded model.")


def _require_model_files(folder: Path, name: str, needs_weights: bool) -> None:
    missing = _missing_model_file(folder, needs_weights)
    if missing is None:
        return
    pickles = sorted(path.name for pattern in _PICKLE_FILES for path in folder.glob(pattern))
    if missing == "*.safetensors":
        there = f" (there are {', '.join(pickles[:3])})" if pickles else ""
        raise ModelSourceError(
            f"{name!r} holds no *.safetensors weights{there}; pickle files are never loaded: convert the model to safetensors, "
            "or name one that has them."
        )
    raise ModelSourceError(f"{name!r} ({folder}) lacks {missing}; it is not a whole model folder.")


def _missing_model_file(folder: Path, needs_weights: bool) -> str | None:
    if not (folder / "config.json").is_file():
        return "config.json"
    if not needs_weights:
        return None
    index = folder / INDEX_FILE
    if index.is_file():
        return next((name for name in sorted(set(read_weight_map(index).values())) if not (folder / name).is_file()), None)
    return None if any(folder.glob("*.safetensors")) else "*.safetensors"


def _has_tokenizer(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES)
