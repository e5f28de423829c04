"""The tensors that hold all keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedcore.batch import KVLayout
from pagedcore_kernels import indexable


class KVCache:
    """Owns the keys and values of all layers, [num_layers, num_blocks, block_size, 2 K, D]: a token's keys lie beside its values.

    Blocks start with whatever the memory held. A block is opened (made zero) before a row writes its first slot, unless the
    same pass fills it: slots behind a row's last token are then finite, whatever the block's owner before left there.
    """

    def __init__(self, layout: KVLayout, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (layout.num_layers, num_blocks, block_size, 2 * layout.num_kv_heads, layout.head_dim)
        self.data = torch.empty(shape, dtype=dtype, device=device)

    def open_blocks(self, block_ids: Tensor) -> None:
        """Make these blocks zero in all layers."""
        indexable(self.data).index_fill_(1, block_ids, 0)

    def keys(self, layer: int) -> Tensor:
        """[num_blocks, block_size, K, D], a view."""
        return self.data[layer, :, :, : self.layout.num_kv_heads]

    def values(self, layer: int) -> Tensor:
        """[num_blocks, block_size, K, D], a view."""
        return self.data[layer, :, :, self.layout.num_kv_heads :]

    def flat_blocks(self, layer: int) -> Tensor:
        """[num_blocks, block_size * 2 K * D], a view: what gathering whole blocks indexes."""
        return self.data[layer].flatten(1)
