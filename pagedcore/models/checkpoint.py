"""Weights of a decoder: read from safetensors files one tensor at a time, or drawn at random."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagedcore.errors import CheckpointError
from pagedcore.models.decoder import Decoder
from pagedcore.models.device_upload import DeviceUpload
from pagedcore.models.safetensors_index import INDEX_FILE, read_weight_map
from pagedcore.quant import TensorSpec

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) after each tensor."""

_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_FLOAT_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})
_WORD_DTYPES = frozenset({torch.int32, torch.int64})
_SMALL_INTEGER_DTYPES = _WORD_DTYPES | {torch.int8}
"""What may stand unpacked where a packed form has another shape."""
_WORD_RANGE = (-(1 << 31), (1 << 32) - 1)
"""Words are bits: 64-bit integers may hold them signed or not."""
_PACKED = ("qweight", "weight_packed")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_MAX_NAMED = 4


def load_dummy_weights(decoder: Decoder, seed: int, progress: Progress | None = None) -> None:
    """Fill `decoder` with random weights: norms are 1, all else is normal with the config's initializer_range."""
    decoder.load(DummySource(decoder, seed, progress))


class SafetensorsSource:
    """Owns the open safetensors files of one folder. A context manager: the files close at its end.

    Raises `CheckpointError`, naming file and tensor, for one that is missing, unexpected, of another shape or kind, and for a
    folder with no safetensors.
    """

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
        self._upload = DeviceUpload(device) if device.type == "cuda" else None

    def __enter__(self) -> SafetensorsSource:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._handles.clear()
        self._files.close()

    @property
    def names(self) -> Collection[str]:
        """All tensors in the folder."""
        return self._paths.keys()

    def fill(self, decoder: Decoder) -> None:
        """Load every weight of `decoder`, and no other tensor."""
        self._check_names(decoder.declare(), tied_head=decoder.has_tied_head)
        if decoder.has_tied_head and _HEAD in self._paths:
            self._check_tied_head()
        decoder.load(self)
        self._report(self._total_bytes - self._done_bytes)  # file headers and ignored tensors are part of the total

    def _check_names(self, expected: Iterable[str], *, tied_head: bool) -> None:
        """Old buffers and a tied head may be there."""
        wanted, present = set(expected), set(self._paths)
        missing = sorted(wanted - present)
        if missing:
            raise CheckpointError(f"{self._model_dir} lacks {_named(missing)}, which config.json asks for.{_packed_hint(missing, present)}")
        extra = sorted(name for name in present - wanted if not _is_ignored(name, tied_head))
        if extra:
            raise CheckpointError(
                f"{self._model_dir} holds {_named(extra)}, which its config.json has no use for; is it the config of another model?"
            )

    def _check_tied_head(self) -> None:
        """A head that is not the embedding must not be left out silently."""
        embedding, head = (self._tensor(name).to(self._dtype) for name in (_EMBEDDING, _HEAD))
        if not torch.equal(embedding, head):
            raise CheckpointError(
                f"{self._model_dir} holds an {_HEAD} that differs from {_EMBEDDING}, and its config.json says that they are one; "
                "set tie_word_embeddings to false there if the head is meant, or remove it from the file."
            )

    def read(self, name: str, spec: TensorSpec) -> Tensor:
        path, tensor = self._paths[name], self._tensor(name)
        if tuple(tensor.shape) not in (spec.shape, *spec.other_shapes):
            raise CheckpointError(f"{name} in {path} has shape {list(tensor.shape)} and must have {list(spec.shape)} by {spec.reason}.")
        covered = _covered_dtypes(tensor, spec)
        if tensor.dtype not in covered:
            raise CheckpointError(f"{name} in {path} is of {tensor.dtype}; {_dtype_names(covered)} are covered.")
        _check_values(f"{name} in {path}", tensor, spec)
        self._report(tensor.nbytes)
        dtype = spec.dtype or self._dtype
        return tensor.to(self._device, dtype, copy=True) if self._upload is None else self._upload(tensor.to(dtype))

    def _tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._open(self._paths[name]).get_tensor(name)
        return tensor

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
        self._total_bytes = sum(map(self._num_bytes, decoder.declare().values()))

    def read(self, name: str, spec: TensorSpec) -> Tensor:
        dtype, device = spec.dtype or self._decoder.dtype, self._decoder.device
        self._done_bytes += self._num_bytes(spec)
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)
        if name.endswith("norm.weight"):
            return torch.ones(spec.shape, dtype=dtype, device=device)
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{self._seed}:{name}".encode()))
        if spec.dummy is not None:
            return spec.dummy(generator).to(dtype)
        std = self._decoder.architecture.initializer_range
        return torch.empty(spec.shape, dtype=dtype, device=device).normal_(std=std, generator=generator)

    def _num_bytes(self, spec: TensorSpec) -> int:
        return torch.Size(spec.shape).numel() * (spec.dtype or self._decoder.dtype).itemsize


def _covered_dtypes(tensor: Tensor, spec: TensorSpec) -> frozenset[torch.dtype]:
    if spec.dtype != torch.int32:
        return _FLOAT_DTYPES
    return _WORD_DTYPES if tuple(tensor.shape) == spec.shape else _SMALL_INTEGER_DTYPES


def _check_values(where: str, tensor: Tensor, spec: TensorSpec) -> None:
    """Raise `CheckpointError` for integers that are no 32-bit words, and for scales that make a matrix infinite or no number."""
    if tensor.dtype == torch.int64 and tensor.numel():
        low, high = int(tensor.min()), int(tensor.max())
        if low < _WORD_RANGE[0] or high > _WORD_RANGE[1]:
            raise CheckpointError(f"{where} holds integers from {low} to {high}, which do not fit into 32 bits; fetch the model again.")
    if spec.dtype == torch.float32 and not bool(tensor.isfinite().all()):
        raise CheckpointError(f"{where} holds scales that are infinite or not a number; fetch the model again.")


def _dtype_names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


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
    """What the index says, and what else its files hold: a tensor that it forgot must not be left out silently."""
    weight_map = read_weight_map(index)
    by_file: defaultdict[str, list[str]] = defaultdict(list)
    for name, file_name in weight_map.items():
        by_file[file_name].append(name)
    paths: dict[str, Path] = {}
    for file_name, names in by_file.items():
        path = model_dir / file_name
        if not path.is_file():
            raise CheckpointError(f"{index} names {file_name}, which is not in {model_dir}; fetch the model again.")
        held = _names_in(path)
        absent = sorted(set(names) - set(held))
        if absent:
            raise CheckpointError(f"{index} says that {file_name} holds {_named(absent)}, and it does not.")
        paths |= dict.fromkeys(held, path)
    return paths | {name: model_dir / file_name for name, file_name in weight_map.items()}


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


def _packed_hint(missing: list[str], present: Collection[str]) -> str:
    """For a packed matrix where a plain one is missed: the settings that tell how it is packed are not there."""
    modules = [name.removesuffix(".weight") for name in missing if name.endswith(".weight")]
    packed = next((name for module in modules for kind in _PACKED if (name := f"{module}.{kind}") in present), None)
    return f" It holds {packed}, and neither config.json nor a file beside it says how that is packed." if packed else ""


def _named(names: list[str]) -> str:
    rest = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + rest
