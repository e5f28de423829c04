"""The engine that most tests of this room talk to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.remote_engines import Hosted, hosted


@pytest.fixture
def one() -> Iterator[Hosted]:
    with hosted() as running:
        yield running
