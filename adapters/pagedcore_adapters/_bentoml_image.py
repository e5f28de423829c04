"""The container that `bentoml build` describes for a service of ours."""

from __future__ import annotations

from bentoml.images import Image

import pagedcore

PYTHON_VERSION = "3.11"
WHEEL = f"./wheels/pagedcore-{pagedcore.__version__}-py3-none-any.whl"
"""Where the build finds this version's wheel, in a folder that the Bento includes: `pip wheel --no-deps --wheel-dir wheels SOURCES`."""
GRAMMAR = "llguidance>=1.8,<2"
"""The extra of this name; BentoML's locking takes a wheel by its path, and then no extras."""


def default_image(*packages: str) -> Image:
    """Python, the C compiler that BentoML installs (Triton needs one), pagedcore and `packages`; the build locks every version."""
    return Image(python_version=PYTHON_VERSION).python_packages(WHEEL, GRAMMAR, *packages)
