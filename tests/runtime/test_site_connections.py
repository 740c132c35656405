"""What may be in flight to processes of the own site and of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.training.trainer_process import TrainerWorker
from streamrl.transport.delivery import Outbox
from tests.security.keyed_place import make_place

LARGEST_CHUNK = 256 * 2**20
"""Bytes of the largest chunk that `weights.chunk_mb` allows."""


def test_weights_for_the_own_sites_relay_take_little_memory_there_however_large_their_chunks_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait in the relay's memory while its store makes room."""
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    worker = TrainerWorker(make_place(tmp_path).context("trainer-0"))
    assert worker.hub.flows is not None
    flow = worker.hub.flows("service-here")
    most = {}
    for size in (1000, 2**24, LARGEST_CHUNK):
        outbox: Outbox[str] = Outbox(flow.credits, flow.window_bytes)
        while outbox.has_credit:
            outbox.send("chunk", 0.0, size)
        most[size] = len(outbox.pending)
    assert most == {1000: 16, 2**24: 16, LARGEST_CHUNK: 1}
