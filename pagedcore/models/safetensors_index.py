"""Which file of a folder holds which tensor, as its index says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pagedcore.errors import CheckpointError
from pagedcore.json_file import read_json_object

INDEX_FILE = "model.safetensors.index.json"


def read_weight_map(index: Path) -> Mapping[str, str]:
    """Tensor -> name of a file beside the index. Raises `CheckpointError`."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(Path(str(file)).name == file for file in weight_map.values()):
        raise CheckpointError(f"{index} must map tensor names to names of files beside it.")
    return weight_map
