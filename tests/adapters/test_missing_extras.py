"""An adapter without its framework says which extra brings it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pagedcore_adapters._extras import missing_extra
from support.repository import PACKAGE_FOLDERS, ROOT

WITHOUT = """
import sys
sys.modules[{framework!r}] = None
from pagedcore import MissingExtraError
try:
    import pagedcore_adapters.{module}
except MissingExtraError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("module", "framework", "extra"),
    [
        ("litserve_api", "litserve", "litserve"),
        ("bentoml_service", "bentoml", "bentoml"),
        ("langchain_chat", "langchain_core", "langchain"),
        ("langchain_llm", "langchain_core", "langchain"),
    ],
)
def test_the_error_names_the_extra(module: str, framework: str, extra: str) -> None:
    paths = ":".join(str(folder.parent) for folder in PACKAGE_FOLDERS.values())
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(module=module, framework=framework)],
        env={"PYTHONPATH": paths, "PATH": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{framework} is not installed and this adapter needs it; install it with: pip install -e '.[{extra}]'.\n"


def test_a_framework_that_is_there_and_broken_keeps_its_own_error() -> None:
    cause = ImportError("cannot import name 'x' from 'numpy'", name="numpy")
    assert missing_extra("litserve", "litserve", cause) is cause
    assert missing_extra("litserve", "litserve", ImportError("no name")).args == ("no name",)
