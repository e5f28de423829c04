"""`pagedcore doctor`: facts and recommendations, as tables or as JSON."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedcore.commands.machine import Machine, read_machine
from pagedcore.commands.recommendation import EMBEDDED_SHAPE, GIB, Recommendation, read_shape, recommend
from pagedcore.extras import pip_command

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

QUANTIZED_ON_GPU = "packed, 4 and 8 bit (triton-w4a16, triton-w8a16), in float16 and bfloat16; else a copy dequantized once"


def examine(model: Path | None) -> tuple[Machine, list[Recommendation]]:
    """This machine, and a recommendation for each of its devices. Raises `CheckpointError` for a folder that is no model."""
    machine = read_machine()
    shape = EMBEDDED_SHAPE if model is None else read_shape(model)
    return machine, [recommend(device, shape, element_bytes=element_bytes(device.kind)) for device in machine.devices]


def element_bytes(kind: str) -> int:
    """fp32 on a CPU, else 16 bits."""
    return 4 if kind == "cpu" else 2


def as_json(machine: Machine, recommendations: list[Recommendation]) -> dict[str, Any]:
    """The same content as the tables."""
    return {"machine": dataclasses.asdict(machine), "recommendations": [dataclasses.asdict(item) for item in recommendations]}


def show(console: Console, machine: Machine, recommendations: list[Recommendation]) -> None:
    """Print the tables, then each recommendation with its reasons."""
    console.print(_facts(machine))
    for item in recommendations:
        console.print(
            f"\n[bold]For {item.model} on {item.device}:[/bold] --block-size {item.block_size} --max-num-seqs {item.max_num_seqs}"
        )
        for reason in item.reasons:
            console.print(f"  - {reason}", highlight=False, markup=False)


def _facts(machine: Machine) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, title="pagedcore doctor", title_justify="left")
    for name, value in _rows(machine):
        table.add_row(name, escape(value))  # the names of extras stand in brackets
    return table


def _rows(machine: Machine) -> list[tuple[str, str]]:
    units = "has bf16 units: dtype=bfloat16 is faster than the default float32" if machine.cpu_has_bf16 else "no bf16 units"
    return [
        ("Python", f"{machine.python} on {machine.platform}"),
        ("CPU", f"{machine.num_cpus} cores, {units}"),
        ("quantized weights", f"on the CPU: {_quantized_on_cpu(machine)}; on a GPU: {QUANTIZED_ON_GPU}"),
        ("memory", f"{machine.host_free_bytes / GIB:.1f} GiB free of {machine.host_total_bytes / GIB:.1f} GiB"),
        *[(name, version or "not installed") for name, version in machine.packages.items()],
        *[("GPU", _gpu_line(machine, index)) for index, device in enumerate(machine.devices) if device.kind == "cuda"],
        *([] if any(d.kind == "cuda" for d in machine.devices) else [("GPU", "none that torch can use")]),
        *[(f"extra {extra}", _extra_line(extra, missing)) for extra, missing in machine.extras.items()],
        ("model cache", f"{machine.model_cache}; embedded model: {machine.embedded_model}"),
    ]


def _extra_line(extra: str, missing: list[str]) -> str:
    return f"without {', '.join(missing)}: {pip_command(extra)}" if missing else "installed"


def _quantized_on_cpu(machine: Machine) -> str:
    if machine.cpu_has_int4:
        return "torch's 4-bit product (torch-int4) for few rows with dtype=bfloat16, else a copy dequantized once"
    return "a copy dequantized once (no fast 4-bit product here)"


def _gpu_line(machine: Machine, index: int) -> str:
    device = machine.devices[index]
    free, total = device.free_bytes / GIB, device.total_bytes / GIB
    return (
        f"{index}: {device.name}, compute capability {device.compute_capability}, {free:.1f} of {total:.1f} GiB free, CUDA {machine.cuda}"
    )
