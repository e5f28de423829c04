"""Small GGUF files of the embedded model's kind, written and quantized by the `gguf` package."""

from __future__ import annotations

import zlib
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
HEAD_DIM = HIDDEN // HEADS
TEMPLATE = "{{ messages[0].content }}"
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "hi"]
Q4_1, Q8_0, F32 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F32


def write_gguf(path: Path, *, pre: str = "smollm", tied: bool = True) -> dict[str, NDArray[np.float32]]:
    """Write a model; return its tensors as the `gguf` package dequantizes them, under their GGUF names."""
    writer = gguf.GGUFWriter(path, "llama")
    _write_metadata(writer, pre)
    tensors = {}
    for name, (shape, kind) in _tensors(tied).items():
        values = np.random.default_rng(zlib.crc32(name.encode())).normal(scale=0.1, size=shape).astype(np.float32)
        packed = values if kind == F32 else gguf.quants.quantize(values, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
        tensors[name] = values if kind == F32 else gguf.quants.dequantize(packed, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def _write_metadata(writer: gguf.GGUFWriter, pre: str) -> None:
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, *[1] * (len(TOKENS) - 3)])
    writer.add_token_merges(["1 2", "h i"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)


def _tensors(tied: bool) -> dict[str, tuple[tuple[int, ...], gguf.GGMLQuantizationType]]:
    layer = {
        "attn_norm": ((HIDDEN,), F32),
        "attn_q": ((HIDDEN, HIDDEN), Q4_1),
        "attn_k": ((KV_HEADS * HEAD_DIM, HIDDEN), Q4_1),
        "attn_v": ((KV_HEADS * HEAD_DIM, HIDDEN), Q4_1),
        "attn_output": ((HIDDEN, HIDDEN), Q4_1),
        "ffn_norm": ((HIDDEN,), F32),
        "ffn_gate": ((FEED_FORWARD, HIDDEN), Q4_1),
        "ffn_up": ((FEED_FORWARD, HIDDEN), Q4_1),
        "ffn_down": ((HIDDEN, FEED_FORWARD), Q4_1),
    }
    tensors = {"token_embd.weight": ((len(TOKENS), HIDDEN), Q8_0), "output_norm.weight": ((HIDDEN,), F32)}
    if not tied:
        tensors["output.weight"] = ((len(TOKENS), HIDDEN), gguf.GGMLQuantizationType.F16)
    for i in range(LAYERS):
        tensors |= {f"blk.{i}.{name}.weight": entry for name, entry in layer.items()}
    return tensors
