"""Compiles Triton kernels for cards that are not here, exactly as an op launches them. Triton must not be interpreting.

An op is called on CPU tensors with its launches recorded instead of run; each is then compiled for a target, and what the
compiler says of its shared memory, registers and stack is read from the code it made.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from pagedcore_kernels.triton_ops.attention_common import Card

CAPABILITIES = (80, 86, 89, 90)
SMALL_SHARED_BYTES = 99 * 1024
"""What a program may use on sm_86 and sm_89."""

_MULTIPROCESSORS = {80: 108, 86: 82, 89: 128, 90: 132}
_TYPE_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}


@dataclass(frozen=True)
class Launch:
    """One kernel with the arguments that an op gave it."""

    kernel: JITFunction
    arguments: Mapping[str, object]
    options: Mapping[str, object]


@dataclass(frozen=True)
class Compiled:
    """What a kernel takes of a card, by the compiler's own report."""

    name: str
    shared_bytes: int
    num_registers: int
    stack_bytes: int
    ptx: str


def compile_op(call: Callable[[], object], capability: int) -> list[Compiled]:
    """Compile every kernel that `call` would launch on a card of this capability (90 for sm_90)."""
    return [compile_launch(launch, capability) for launch in record_launches(call, capability)]


def record_launches(call: Callable[[], object], capability: int) -> list[Launch]:
    """What `call` launches, as if its CPU tensors were on such a card. Fails if it launches nothing."""
    launches: list[Launch] = []
    card = Card(capability, _MULTIPROCESSORS[capability])

    def record(self: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
        named = dict(zip(self.arg_names, args, strict=False))
        named |= {name: value for name, value in kwargs.items() if name in self.arg_names}
        assert len(named) == len(self.arg_names), f"{self.__name__} was not given {set(self.arg_names) - set(named)}"
        launches.append(Launch(self, named, {name: value for name, value in kwargs.items() if name not in self.arg_names}))

    patches = [mock.patch.object(JITFunction, "run", record)]
    patches += [mock.patch.object(module, "card_of", return_value=card) for module in _users_of_card_of()]
    for patch in patches:
        patch.start()
    try:
        call()
    finally:
        for patch in patches:
            patch.stop()
    assert launches, "the op launched no kernel"
    return launches


def _users_of_card_of() -> list[object]:
    modules = [module for name, module in sys.modules.items() if name.startswith("pagedcore_kernels.")]
    return [module for module in modules if hasattr(module, "card_of")]


def compile_launch(launch: Launch, capability: int) -> Compiled:
    """Raises what the compiler raises."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], object] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None or (_is_int(value) and value == 1 and not parameter.do_not_specialize):
            signature[parameter.name] = "constexpr"
            constants[index,] = value
            continue
        signature[parameter.name] = _type_name(value)
        if _is_aligned(value) and not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment):
            attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(launch.options))
    registers, stack = _resources(built.asm["cubin"])
    return Compiled(launch.kernel.__name__, built.metadata.shared, registers, stack, built.asm["ptx"])


def assembler_report(ptx: str, architecture: str = "sm_90a") -> str:
    """What the assembler says of a kernel when it is asked to say all."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [tool, "--verbose", f"--gpu-name={architecture}", source, "--output-file", source.with_suffix(".cubin")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _type_name(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + _TYPE_NAMES[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    assert isinstance(value, float), f"a kernel cannot take {value!r}"
    return "fp32"


def _is_aligned(value: object) -> bool:
    return value.data_ptr() % 16 == 0 if isinstance(value, torch.Tensor) else _is_int(value) and value % 16 == 0


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread and stack bytes a thread, which are spills where no array is indexed."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert found, report
    return int(found[1]), int(found[2])
