"""Inputs of a matrix that share one scale."""

from __future__ import annotations

from pagedcore.errors import CheckpointError
from pagedcore.quant.checkpoint_settings import CheckpointSettings

_ONE_GROUP = -1


def count_groups(name: str, in_features: int, out_features: int, group_size: int | None) -> int:
    """Groups of `group_size` inputs in the matrix of module `name`; None is one group of them all.

    Raises `CheckpointError`, naming module and sizes, where the group size does not divide the inputs.
    """
    if group_size is None:
        return 1
    if in_features % group_size:
        raise CheckpointError(
            f"{name} has {in_features} inputs and {out_features} outputs, and the checkpoint's group_size {group_size} does not divide "
            f"{in_features}; quantize the model with a group size that divides it."
        )
    return in_features // group_size


def read_group_size(reader: CheckpointSettings, *keys: str, default: int | None) -> int | None:
    """The group size under any of `keys`; None, -1 in the file, is one group of all inputs.

    Raises `CheckpointError`, naming key, value and file, for 0 and for what is less than -1.
    """
    size = reader.integer(*keys, default=_ONE_GROUP if default is None else default)
    if size != _ONE_GROUP and size < 1:
        raise reader.refusal(reader.given(*keys), size, "must be positive, or -1 for one group of all inputs")
    return None if size == _ONE_GROUP else size


def group_label(group_size: int | None) -> str:
    """As descriptions of a checkpoint say it."""
    return "channel" if group_size is None else f"group {group_size}"
