"""What every pointwise kernel's launch shares."""

from __future__ import annotations

from torch import Tensor

from pagedcore_kernels.triton_ops.attention_common import card_of


def dependent_launch(x: Tensor) -> dict[str, bool]:
    """Keyword arguments that let a kernel start while the one before it ends, where x's card can.

    The kernel waits for the end of the one before it, and so of all before that one. What it reads or writes after its wait is safe.
    Most let the next one start before they wait, so what a kernel reads before its own wait (weights, block tables, lengths) must not
    be written within the same chain of early starts: any kernel of torch's, such as the look-up of embeddings, ends a chain.
    """
    return {"PDL": True, "launch_pdl": True} if card_of(x.device).has_dependent_launch else {"PDL": False}
