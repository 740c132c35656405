"""Fixtures of the tests of plans."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulated_once import splits_simulated_once


@pytest.fixture
def simulated_once() -> Iterator[None]:
    """Simulate each split once within a test."""
    with splits_simulated_once():
        yield
