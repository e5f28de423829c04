"""How the matrices of a checkpoint are stored and multiplied."""

from pagedcore.quant.detect import read_checkpoint_format
from pagedcore.quant.linear import LinearMethod, LinearSpec, UnquantizedLinear
from pagedcore.quant.linear_factory import LinearFactory
from pagedcore.quant.tensor_spec import TensorSpec

__all__ = ["LinearFactory", "LinearMethod", "LinearSpec", "TensorSpec", "UnquantizedLinear", "read_checkpoint_format"]
