"""Weights arrive bit-equal or not at all."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from streamrl.errors import RunFailed
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Hub, Link
from streamrl.weights.publisher import WeightPublisher
from streamrl.weights.relay import WeightRelay
from streamrl.weights.store import WeightStore
from streamrl.weights.version import CorruptWeights, Manifest, lay_out
from tests.training.conftest import free_port


def some_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(37, 16, generator=generator).bfloat16(),
        "norm": torch.randn(16, generator=generator),
        "transposed": torch.randn(5, 9, generator=generator).half().t(),
        "scalar": torch.tensor(3.5),
        "nothing": torch.zeros(0, 4),
    }


def test_layout_is_bit_exact_and_its_hash_depends_on_every_bit() -> None:
    tensors = some_tensors()
    manifest, buffer = lay_out(3, tensors.items())
    back = dict(manifest.tensors_of(buffer))
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)
    assert lay_out(9, tensors.items())[0].version.content_hash == manifest.version.content_hash
    changed = tensors | {"norm": tensors["norm"].clone()}
    changed["norm"].view(torch.int32)[0] ^= 1
    assert lay_out(3, changed.items())[0].version.content_hash != manifest.version.content_hash
    renamed = {("norm2" if name == "norm" else name): tensor for name, tensor in tensors.items()}
    assert lay_out(3, renamed.items())[0].version.content_hash != manifest.version.content_hash


def test_a_manifest_that_lies_is_refused() -> None:
    values = lay_out(1, some_tensors().items())[0].to_dict()
    assert Manifest.from_dict(values).to_dict() == values
    with pytest.raises(CorruptWeights, match="does not match"):
        Manifest.from_dict(values | {"content_hash": "0" * 64})
    outside = [list(t) for t in values["tensors"]]
    outside[0][3] = 10**9
    with pytest.raises(CorruptWeights, match="outside"):
        Manifest.from_dict(values | {"tensors": outside})
    with pytest.raises(CorruptWeights, match="malformed"):
        Manifest.from_dict({"number": 1})


def test_the_store_names_only_verified_versions(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "store")
    manifest, buffer = lay_out(1, some_tensors().items())
    target = store.begin(manifest)
    target[:] = buffer
    target[100] ^= 4
    with pytest.raises(CorruptWeights, match=r"tensor 'embed' is corrupt"):
        store.commit(manifest, target)
    with pytest.raises(FileNotFoundError):
        store.open(1)
    target = store.begin(manifest)
    target[:] = buffer
    store.commit(manifest, target)
    read_manifest, read_buffer = store.open(1)
    assert read_manifest == manifest
    np.testing.assert_array_equal(read_buffer, buffer)
    store.keep_only({2})
    assert not list(store.directory.glob("version_1*"))


@pytest.mark.parametrize("damaged_transfers", [0, 1, 3])
def test_a_relay_refetches_what_is_corrupt_and_gives_up_with_the_cause(tmp_path: Path, damaged_transfers: int) -> None:
    manifest, buffer = lay_out(7, some_tensors().items())

    class Damaging(WeightPublisher):
        """Flips a bit in the first transfers, as a bad link would."""

        sends = 0

        async def _send(self, request: object) -> None:
            self.sends += 1
            sent = buffer.copy()
            if self.sends <= damaged_transfers:
                sent[len(sent) // 2] ^= 1
            self._versions[7] = (manifest, sent)
            await super()._send(request)  # type: ignore[arg-type]

    async def body() -> None:
        address = f"tcp://127.0.0.1:{free_port()}"
        hub = Hub("publisher", WaitRegistry("publisher"), credits=2).bind(address)
        publisher = Damaging(hub, chunk_bytes=100)
        publisher.publish(manifest, buffer)
        serving = asyncio.create_task(publisher.serve())
        link = await Link("relay", "relay", WaitRegistry("relay")).connect(address, 10)
        relay = WeightRelay(link, WeightStore(tmp_path), limit_s=10)
        try:
            if damaged_transfers == 3:
                with pytest.raises(RunFailed, match="arrived corrupt 3 times"):
                    await relay.fetch(7, manifest.version.content_hash)
            else:
                await relay.fetch(7, manifest.version.content_hash)
                np.testing.assert_array_equal(relay.store.open(7)[1], buffer)
            assert relay.corrupt == damaged_transfers
            with pytest.raises(RunFailed, match="no weight version 8"):
                await relay.fetch(8, "x")
            with pytest.raises(RunFailed, match="corrupt"):
                await relay.fetch(7, "of another run")
        finally:
            serving.cancel()
            await link.close()
            await hub.close()

    asyncio.run(body())
