"""What every pointwise kernel's launch shares."""

from __future__ import annotations

from torch import Tensor

from pagedcore_kernels.triton_ops.attention_common import card_of


def dependent_launch(x: Tensor) -> dict[str, bool]:
    """Keyword arguments that let a kernel start while the one before it ends, where x's card can.

    The kernel waits for that one's end before it reads or writes anything, and only then lets the next one start: whatever
    starts early finds all kernels but its direct predecessor finished.
    """
    return {"PDL": True, "launch_pdl": True} if card_of(x.device).has_dependent_launch else {"PDL": False}
