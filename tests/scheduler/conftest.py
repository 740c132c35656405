"""Fixtures of the tests of plans."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulated_once import splits_simulated_once


@pytest.fixture(scope="module")
def simulated_once() -> Iterator[None]:
    """Simulate each split once for all tests of a file."""
    with splits_simulated_once():
        yield
