"""Imports without garbage collection."""

from __future__ import annotations

import gc

import pytest

from streamrl.imports import importing


def test_no_garbage_is_collected_meanwhile_and_what_exists_by_then_is_never_looked_through() -> None:
    before = gc.get_freeze_count()
    with importing():
        made = [[] for _ in range(100_000)]
        assert not gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count() >= before + len(made)
    assert not any(one is made for one in gc.get_objects())
    gc.unfreeze()


def test_garbage_is_collected_again_after_an_import_that_failed() -> None:
    with pytest.raises(ImportError), importing():
        import streamrl.no_such_module  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()
    gc.unfreeze()
