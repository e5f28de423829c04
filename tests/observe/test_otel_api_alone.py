"""OpenTelemetry's API without its SDK, as FastAPI brings it: nothing of ours takes it for tracing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagedcore import extras as extras_module
from pagedcore.commands.doctor import _extra_line
from pagedcore.errors import MissingExtraError
from pagedcore.extras import extras, missing, pip_command
from pagedcore.tracing.otlp import otlp_provider
from support.repository import PACKAGE_FOLDERS

API = "opentelemetry-api"
SDK = "opentelemetry-sdk"
EXPORTER = "opentelemetry-exporter-otlp-proto-http"

WITHOUT_SDK = """
import sys
for name in ("opentelemetry.sdk", "opentelemetry.exporter"):
    sys.modules[name] = None
import pagedcore.openai
from pagedcore.tracing.spans import Spans
from pagedcore.traceparent import current_traceparent
print("opentelemetry.trace" in sys.modules, Spans("m").has_provider, current_traceparent())
"""


def test_doctor_does_not_take_the_api_for_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras_module, "version_of", lambda name: "1.45" if name == API else None)
    lacking = missing(extras()["otel"])
    assert lacking == [SDK, EXPORTER]
    assert _extra_line("otel", lacking) == f"without {SDK}, {EXPORTER}: {pip_command('otel')}"


def test_an_endpoint_without_the_sdk_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(
        MissingExtraError, match=r"needs OpenTelemetry's SDK and OTLP exporter, .* \(its API alone comes with other packages\)"
    ):
        otlp_provider("http://localhost:4318", "0")


def test_the_api_alone_makes_no_spans_and_no_request_looks_traced() -> None:
    """A process of its own: the API's provider is the same for the whole process."""
    pytest.importorskip("opentelemetry.trace")
    paths = os.pathsep.join(str(Path(folder).parent) for folder in PACKAGE_FOLDERS.values())
    code = "import opentelemetry.trace\n" + WITHOUT_SDK
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout.split() == ["True", "False", "None"], done.stderr
