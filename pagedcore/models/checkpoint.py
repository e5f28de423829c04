"""Weights of a decoder: read from safetensors files one tensor at a time, or drawn at random."""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagedcore.errors import CheckpointError
from pagedcore.models.decoder import Decoder
from pagedcore.quant.linear import Shape

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) after each tensor."""

INDEX_FILE = "model.safetensors.index.json"
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_FLOAT_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})
_MAX_NAMED = 4


def load_weights(model_dir: Path, decoder: Decoder, progress: Progress | None = None) -> None:
    """Fill `decoder` from the folder's safetensors files.

    Raises `CheckpointError`, naming file and tensor, for one that is missing, unexpected, of another shape or not of
    floats, and for a folder with no safetensors.
    """
    with SafetensorsSource(model_dir, decoder.dtype, decoder.device, progress) as source:
        source.check_names(decoder.declare(), tied_head=decoder.architecture.tied_embeddings)
        decoder.load(source)
        source.finish()


def load_dummy_weights(decoder: Decoder, seed: int, progress: Progress | None = None) -> None:
    """Fill `decoder` with random weights: norms are 1, all else is normal with the config's initializer_range."""
    decoder.load(DummySource(decoder, seed, progress))


class SafetensorsSource:
    """Owns the open safetensors files of one folder. A context manager: the files close at its end."""

    def __init__(self, model_dir: Path, dtype: torch.dtype, device: torch.device, progress: Progress | None = None) -> None:
        self._model_dir = model_dir
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._files = ExitStack()
        self._paths = _tensor_paths(model_dir)
        self._handles: dict[Path, Any] = {}
        self._done_bytes = 0
        self._total_bytes = sum(path.stat().st_size for path in set(self._paths.values()))

    def __enter__(self) -> SafetensorsSource:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._handles.clear()
        self._files.close()

    def check_names(self, expected: Iterable[str], *, tied_head: bool) -> None:
        """Raise `CheckpointError` unless the folder's tensors are the expected ones; old buffers and a tied head may be there."""
        wanted, present = set(expected), set(self._paths)
        missing = sorted(wanted - present)
        if missing:
            raise CheckpointError(f"{self._model_dir} lacks {_named(missing)}, which config.json asks for.")
        extra = sorted(name for name in present - wanted if not _is_ignored(name, tied_head))
        if extra:
            raise CheckpointError(
                f"{self._model_dir} holds {_named(extra)}, which its config.json has no use for; is it the config of another model?"
            )

    def read(self, name: str, shape: Shape) -> Tensor:
        path = self._paths[name]
        tensor: Tensor = self._open(path).get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{name} in {path} has shape {list(tensor.shape)} and must have {list(shape)} by config.json.")
        if tensor.dtype not in _FLOAT_DTYPES:
            raise CheckpointError(f"{name} in {path} is of {tensor.dtype}; float32, float16, bfloat16 and float64 are covered.")
        self._report(tensor.nbytes)
        return tensor.to(device=self._device, dtype=self._dtype, copy=True)

    def finish(self) -> None:
        """Report the whole: file headers and ignored tensors are part of the total."""
        self._report(self._total_bytes - self._done_bytes)

    def _open(self, path: Path) -> Any:
        if path not in self._handles:
            self._handles[path] = self._files.enter_context(_open_file(path))
        return self._handles[path]

    def _report(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)


class DummySource:
    """Random tensors that depend on the seed and their name alone, so that neither order nor sharding changes them."""

    def __init__(self, decoder: Decoder, seed: int, progress: Progress | None = None) -> None:
        self._decoder = decoder
        self._seed = seed
        self._progress = progress
        self._done_bytes = 0
        self._total_bytes = sum(_num_bytes(shape, decoder.dtype) for shape in decoder.declare().values())

    def read(self, name: str, shape: Shape) -> Tensor:
        dtype, device = self._decoder.dtype, self._decoder.device
        self._done_bytes += _num_bytes(shape, dtype)
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=device)
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{self._seed}:{name}".encode()))
        return torch.empty(shape, dtype=dtype, device=device).normal_(std=self._decoder.architecture.initializer_range, generator=generator)


def _num_bytes(shape: Shape, dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _tensor_paths(model_dir: Path) -> dict[str, Path]:
    """File of each tensor: by the index where there is one, else by the headers of all safetensors files."""
    index = model_dir / INDEX_FILE
    if index.is_file():
        return _indexed_paths(model_dir, index)
    paths: dict[str, Path] = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        for name in _names_in(path):
            if name in paths:
                raise CheckpointError(f"{name} is in both {paths[name]} and {path.name}; keep one, or add {INDEX_FILE}.")
            paths[name] = path
    if not paths:
        raise _no_safetensors(model_dir)
    return paths


def _indexed_paths(model_dir: Path, index: Path) -> dict[str, Path]:
    weight_map = _weight_map(index)
    by_file: defaultdict[str, list[str]] = defaultdict(list)
    for name, file_name in weight_map.items():
        by_file[file_name].append(name)
    for file_name, names in by_file.items():
        path = model_dir / file_name
        if not path.is_file():
            raise CheckpointError(f"{index} names {file_name}, which is not in {model_dir}; fetch the model again.")
        absent = sorted(set(names) - set(_names_in(path)))
        if absent:
            raise CheckpointError(f"{index} says that {file_name} holds {_named(absent)}, and it does not.")
    return {name: model_dir / file_name for name, file_name in weight_map.items()}


def _weight_map(index: Path) -> Mapping[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} cannot be read: {error!r}.") from error
    if not isinstance(weight_map, dict) or not all(Path(str(file)).name == file for file in weight_map.values()):
        raise CheckpointError(f"{index} must map tensor names to names of files beside it.")
    return weight_map


def _names_in(path: Path) -> list[str]:
    with _open_file(path) as file:
        return list(file.keys())


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}. Fetch it again.") from error


def _no_safetensors(model_dir: Path) -> CheckpointError:
    pickles = sorted(path.name for pattern in _PICKLE_PATTERNS for path in model_dir.glob(pattern))
    if pickles:
        return CheckpointError(
            f"{model_dir} holds its weights as pickle files ({', '.join(pickles[:_MAX_NAMED])}), which can run code when they "
            "are read and are never opened; convert them to safetensors, or use a revision that has them."
        )
    return CheckpointError(f"{model_dir} holds no *.safetensors file.")


def _is_ignored(name: str, tied_head: bool) -> bool:
    return name.endswith("rotary_emb.inv_freq") or (tied_head and name == "lm_head.weight")


def _named(names: list[str]) -> str:
    rest = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + rest
