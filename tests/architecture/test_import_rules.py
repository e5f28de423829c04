"""Who may import whom. import-linter holds the rules that count indirect imports, the tables here the direct ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.repository import PACKAGE_FOLDERS, ROOT, imported_modules, module_name, package_files, python_files

HEAVY = (
    "torch",
    "triton",
    "numpy",
    "transformers",
    "prometheus_client",
    "fastapi",
    "pydantic",
    "litserve",
    "bentoml",
    "langchain_core",
    "llguidance",
    "opentelemetry",
    "typer",
)


def test_import_linter_keeps_every_contract() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "adapters"))),
            "PYTHONIOENCODING": "utf-8",
        },
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_core_imports_the_standard_library_two_plain_rooms_and_four_plain_modules_only() -> None:
    modules = ("core", "host_tier", "tenancy", "errors", "sampling_params", "outputs", "messages")
    allowed = {f"pagedcore.{name}" for name in modules}
    for path in python_files(ROOT / "pagedcore" / "core"):
        for module in imported_modules(path):
            is_allowed = module.split(".")[0] in sys.stdlib_module_names or any(module == a or module.startswith(a + ".") for a in allowed)
            assert is_allowed, f"{path.name} imports {module}"


@pytest.mark.parametrize(("folder", "allowed"), [("tenancy", {"tenancy", "errors", "shown"}), ("host_tier", {"host_tier", "tenancy"})])
def test_what_the_core_stands_on_imports_the_standard_library_and_little_else(folder: str, allowed: set[str]) -> None:
    for path in python_files(ROOT / "pagedcore" / folder):
        for module in imported_modules(path):
            is_allowed = module.split(".")[0] in sys.stdlib_module_names or module.split(".")[1:2][0] in allowed
            assert is_allowed, f"{path.name} imports {module}"


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [("models", {"batch", "config", "errors", "json_file", "models", "quant"}), ("quant", {"errors", "json_file", "quant"})],
)
def test_models_and_quant_see_few_rooms(folder: str, allowed: set[str]) -> None:
    for path in python_files(ROOT / "pagedcore" / folder):
        seen = {module.split(".")[1] for module in imported_modules(path) if module.startswith("pagedcore.")}
        assert seen <= allowed, f"{path.name} imports pagedcore.{sorted(seen - allowed)}"


def test_the_runtime_sees_of_the_core_the_plain_step_values_only() -> None:
    for path in python_files(ROOT / "pagedcore" / "runtime"):
        core = {module for module in imported_modules(path) if module.startswith("pagedcore.core.")}
        assert all(module.startswith("pagedcore.core.step") for module in core), f"{path.name} imports {sorted(core)}"


def test_kernels_import_torch_and_triton_only() -> None:
    allowed = {"torch", "triton", "pagedcore_kernels", *sys.stdlib_module_names}
    for path in python_files(PACKAGE_FOLDERS["pagedcore_kernels"]):
        seen = {module.split(".")[0] for module in imported_modules(path)}
        assert seen <= allowed, f"{path.name} imports {sorted(seen - allowed)}"


def test_reference_ops_import_no_triton() -> None:
    for path in python_files(PACKAGE_FOLDERS["pagedcore_kernels"] / "reference"):
        assert not any(module.split(".")[0] == "triton" for module in imported_modules(path)), path.name


def test_an_adapter_file_imports_one_framework_at_most() -> None:
    frameworks = {"litserve", "bentoml", "langchain_core"}
    for path in python_files(PACKAGE_FOLDERS["pagedcore_adapters"]):
        seen = {module.split(".")[0] for module in imported_modules(path)} & frameworks
        assert len(seen) <= 1, f"{path.name} imports {sorted(seen)}"


def test_nothing_imports_tests_bench_examples_or_deploy() -> None:
    for path in package_files():
        seen = {module.split(".")[0] for module in imported_modules(path)}
        assert not seen & {"tests", "support", "bench", "examples", "deploy"}, path


def test_prometheus_client_is_never_imported_at_module_level() -> None:
    for path in package_files():
        modules = imported_modules(path, module_level_only=True)
        assert not any(module.split(".")[0] == "prometheus_client" for module in modules), (
            f"{module_name(path)}: the multiprocess mode is fixed at the first import, which belongs to the host"
        )


@pytest.mark.parametrize(
    "statement",
    [
        "import pagedcore",
        "from pagedcore import EngineConfig, SamplingParams, AsyncEngineArgs, RequestOutput, PagedCoreError",
        "import pagedcore; dir(pagedcore)",
    ],
)
def test_importing_pagedcore_and_its_plain_names_loads_nothing_heavy(statement: str) -> None:
    assert _heavy_modules_after(statement) == []


def test_importing_every_core_module_loads_nothing_heavy() -> None:
    names = [module_name(path) for path in python_files(ROOT / "pagedcore" / "core")]
    assert names
    assert _heavy_modules_after("import " + ", ".join(names)) == []


def _heavy_modules_after(statement: str) -> list[str]:
    report = f"{statement}\nimport sys\nprint(*[m for m in {HEAVY!r} if m in sys.modules])"
    paths = os.pathsep.join(str(Path(folder).parent) for folder in PACKAGE_FOLDERS.values())
    done = subprocess.run(
        [sys.executable, "-c", report], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()
