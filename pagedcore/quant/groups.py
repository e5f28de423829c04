"""Inputs of a matrix that share one scale."""

from __future__ import annotations

from pagedcore.errors import CheckpointError


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


def group_label(group_size: int | None) -> str:
    """For descriptions."""
    return "channel" if group_size is None else f"group {group_size}"
