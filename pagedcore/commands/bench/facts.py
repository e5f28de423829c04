"""Where a run was made: commit, versions, card, model."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from pathlib import Path

import pagedcore
from pagedcore.commands.bench.results import Fact
from pagedcore.commands.machine import usable_cpus
from pagedcore.config import EnginePlan
from pagedcore.extras import version_of

SHAPE_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)


def software_facts() -> dict[str, Fact]:
    """When, and with what."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit_of(Path(pagedcore.__file__).parent),
        "pagedcore": pagedcore.__version__,
        "python": platform.python_version(),
        "torch": version_of("torch"),
        "triton": version_of("triton"),
    }


def default_label() -> str:
    """Name of a run of ours in a plot."""
    return f"pagedcore {pagedcore.__version__}"


def engine_facts(plan: EnginePlan) -> dict[str, Fact]:
    """The machine, and what the engine made of its config."""
    return {
        **software_facts(),
        "device": device_name(plan.device),
        "model": model_name(plan.model_name),
        **model_shape(Path(plan.model_dir)),
        "dtype": plan.dtype,
        "quantization": plan.quantization,
        "kv_cache_dtype": plan.kv_cache_dtype,
        "load_format": plan.config.load_format,
        "attention_backend": plan.attention_backend,
        "linear_backend": plan.linear_backend,
        "block_size": plan.block_size,
        "num_blocks": plan.num_blocks,
        "max_num_seqs": plan.config.max_num_seqs,
        "max_num_batched_tokens": plan.max_num_batched_tokens,
        "enforce_eager": plan.config.enforce_eager,
    }


def model_shape(model_dir: Path) -> dict[str, Fact]:
    """Sizes that config.json says; none where there is no such file."""
    path = model_dir / "config.json"
    if not path.is_file():
        return {}
    config = json.loads(path.read_text(encoding="utf-8"))
    return {name: config[name] for name in SHAPE_FIELDS if name in config}


def model_name(name: str) -> str:
    """Of a local folder its last part, else the name as it is."""
    return Path(name).resolve().name if Path(name).is_dir() else name


def device_name(device: str) -> str:
    """Name of the card, or of the processor and how many of its cores are ours."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {usable_cpus()} cores"


def commit_of(package: Path) -> str | None:
    """Short hash of the checkout that the package lies in, with + where tracked files differ; None outside of its own checkout."""
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    head = _git(package, "rev-parse", "--short", "HEAD")
    changes = _git(package, "status", "--porcelain", "--untracked-files=no")
    return head if head is None else head + ("+" if changes else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor() or platform.machine())
