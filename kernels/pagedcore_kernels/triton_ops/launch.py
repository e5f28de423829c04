"""What every pointwise kernel's launch shares."""

from __future__ import annotations

from torch import Tensor

from pagedcore_kernels.triton_ops.attention_common import card_of


def dependent_launch(x: Tensor) -> dict[str, bool]:
    """Keyword arguments that let a kernel start while the one before it ends, where x's card can.

    The kernel lets the next one start, too, and then waits for the end of the one before, hence of all before that, until it reads or
    writes what kernels write. What a kernel reads earlier (weights, block tables, lengths) may have been written by no kernel of the
    chain that starts early: torch's own kernels, such as the look-up of embeddings, begin a new one.
    """
    return {"PDL": True, "launch_pdl": True} if card_of(x.device).has_dependent_launch else {"PDL": False}
