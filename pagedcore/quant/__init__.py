"""How the matrices of a checkpoint are stored and multiplied."""

from pagedcore.quant.detect import detect_quantization, refuse_quantized
from pagedcore.quant.linear import LinearMethod, LinearSpec, UnquantizedLinear

__all__ = ["LinearMethod", "LinearSpec", "UnquantizedLinear", "detect_quantization", "refuse_quantized"]
