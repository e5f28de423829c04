"""Which dtype `auto` is, by checkpoint, device and CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagedcore.config_checks import DTYPES
from pagedcore.errors import ConfigError
from pagedcore.models.architecture import ModelArchitecture
from pagedcore.models.registry import resolve_dtype
from pagedcore.quant.cpu import cpu_has_bf16_units


def make_architecture(dtype: str | None) -> ModelArchitecture:
    return ModelArchitecture.from_config_dict(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "vocab_size": 8,
            "dtype": dtype,
        }
    )


@pytest.mark.parametrize(
    ("stored", "device", "expected"),
    [
        ("bfloat16", "cpu", torch.float32),
        ("float16", "cpu", torch.float32),
        ("float32", "cpu", torch.float32),
        (None, "cpu", torch.float32),
        ("bfloat16", "cuda", torch.bfloat16),
        ("float16", "cuda", torch.float16),
        ("float32", "cuda", torch.float32),
    ],
)
def test_auto_is_the_checkpoints_dtype_and_float32_on_a_cpu(stored: str | None, device: str, expected: torch.dtype) -> None:
    assert resolve_dtype("auto", make_architecture(stored), torch.device(device)) == expected


def test_every_name_of_the_setting_resolves_to_itself() -> None:
    resolved = {name: resolve_dtype(name, make_architecture("bfloat16"), torch.device("cpu")) for name in DTYPES if name != "auto"}
    assert resolved == {
        "half": torch.float16,
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "float": torch.float32,
        "float32": torch.float32,
    }


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="float8"):
        resolve_dtype("float8", make_architecture(None), torch.device("cpu"))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu avx2 avx512f avx512_bf16", True),
        ("fpu avx2 amx_bf16 amx_tile", True),
        ("fpu avx2 avx512f avx512_bf16_like amx_tile", False),
        ("fpu avx avx2 fma", False),
    ],
)
def test_bf16_units_are_read_from_the_cpus_flags(tmp_path: Path, flags: str, expected: bool) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nmodel name\t: avx512_bf16\nflags\t\t: {flags}\n\nprocessor\t: 1\n")
    assert cpu_has_bf16_units(cpuinfo) is expected


def test_without_cpuinfo_torch_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for answer in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda answer=answer: answer, raising=False)
        assert cpu_has_bf16_units(tmp_path / "none") is answer
