"""A site's own model files are version 0: nothing of it has to travel."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from streamrl.config.run import RunConfig
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Hub, Link
from streamrl.weights import assembly, local_model
from streamrl.weights.local_model import expected_tensors, initial_version
from streamrl.weights.publisher import WeightPublisher
from streamrl.weights.quantize import CodeKind, is_quantized, quantize
from streamrl.weights.site_relay import WeightRelay
from streamrl.weights.version import lay_out
from streamrl.weights.version_store import WeightStore
from tests.ports import free_port
from tests.tiny_model import save_tiny_model
from tests.waiting import scaled
from tests.weights.world import fill


def trained_from(model: Path) -> list[tuple[str, torch.Tensor]]:
    """As the trainer has them: fp32 masters, cast to bf16."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return [(name, parameter.detach().bfloat16()) for name, parameter in loaded.named_parameters()]


def test_the_files_laid_out_are_what_the_trainer_publishes_first(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    expected = expected_tensors(str(tmp_path), "bfloat16", "same")
    known = initial_version(str(tmp_path), expected, "bfloat16", "same")
    assert known is not None
    assert known[0] == lay_out(0, trained_from(tmp_path))[0]
    more = {**expected, "new.weight": ("bfloat16", (1,))}
    assert initial_version(str(tmp_path), more, "bfloat16", "same") is None
    other = {**expected, next(iter(expected)): ("bfloat16", (1, 1))}
    assert initial_version(str(tmp_path), other, "bfloat16", "same") is None


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_the_files_laid_out_hold_8_bit_codes_where_versions_do(tmp_path: Path, kind: Literal["fp8", "int8"]) -> None:
    save_tiny_model(tmp_path)
    expected = expected_tensors(str(tmp_path), "bfloat16", kind)
    known = initial_version(str(tmp_path), expected, "bfloat16", kind)
    assert known is not None
    published = []
    for name, tensor in trained_from(tmp_path):
        if is_quantized(name, tuple(tensor.shape)):
            codes, scales = quantize(tensor, kind)
            published += [(name, codes), (name + ".scale", scales)]
        else:
            published.append((name, tensor))
    assert len(published) > len(trained_from(tmp_path))
    assert known[0] == lay_out(0, published)[0]


@pytest.mark.parametrize("kind", ["same", "int8"])
def test_beside_the_version_one_tensor_of_the_files_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Literal["same", "int8"]
) -> None:
    save_tiny_model(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).save_pretrained(tmp_path)
    expected = expected_tensors(str(tmp_path), "bfloat16", kind)
    made: list[weakref.ref[torch.UntypedStorage]] = []
    most = 0

    class Watched(NamedTuple):
        """A file of tensors that are watched."""

        file: Any

        def get_tensor(self, name: str) -> torch.Tensor:
            nonlocal most
            tensor = self.file.get_tensor(name)
            made.append(weakref.ref(tensor.untyped_storage()))
            most = max(most, sum(one() is not None for one in made))
            return tensor

        def keys(self) -> Any:
            return self.file.keys()

    @contextmanager
    def watching(*args: Any, **keywords: Any) -> Iterator[Watched]:
        with safe_open(*args, **keywords) as file:
            yield Watched(file)

    def quantizing(tensor: torch.Tensor, kind: CodeKind) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = quantize(tensor, kind)
        made.append(weakref.ref(codes.untyped_storage()))
        return codes, scales

    monkeypatch.setattr(local_model, "safe_open", watching)
    monkeypatch.setattr(local_model, "quantize", quantizing)
    assert initial_version(str(tmp_path), expected, "bfloat16", kind) is not None
    assert len(made) >= len(expected) and most == 1


def test_a_seeded_relay_fetches_nothing_first_and_a_delta_then(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    model = str(tmp_path / "model")
    known = initial_version(model, expected_tensors(model, "bfloat16", "same"), "bfloat16", "same")
    assert known is not None

    async def play() -> None:
        address = f"tcp://127.0.0.1:{free_port()}"
        waits = WaitRegistry("test")
        hub = Hub("publisher", waits).bind(address)
        publisher = WeightPublisher(hub, lambda peer: 4096)
        serving = asyncio.ensure_future(publisher.serve())
        link = await Link("service-far", "relay", waits).connect(address, scaled(10))
        relay = WeightRelay(link, WeightStore(tmp_path / "store"), 20, "delta")
        relay.seed(*known)
        tensors = trained_from(tmp_path / "model")
        manifest, buffer = lay_out(0, tensors)
        await publisher.publish(manifest, buffer)
        await relay.fetch(0, manifest.version.content_hash)
        assert relay.last is not None and (relay.last.kind, relay.bytes_received) == ("nothing", 0)
        tensors[0][1].view(torch.int16).view(-1)[::97] ^= 1
        manifest, buffer = lay_out(1, tensors)
        await publisher.publish(manifest, buffer)
        await relay.fetch(1, manifest.version.content_hash)
        assert relay.last.kind == "delta" and 0 < relay.bytes_received < buffer.nbytes / 20
        assert bytes(relay.store.open(1)[1]) == bytes(buffer)
        serving.cancel()
        await link.close()
        await hub.close()

    asyncio.run(play())


@pytest.mark.parametrize("encoding", ["delta", "raw"])
def test_a_restarted_service_goes_on_from_its_newest_version_and_makes_none_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    made: list[int] = []
    monkeypatch.setattr(local_model, "expected_tensors", lambda *_: {})
    monkeypatch.setattr(local_model, "initial_version", lambda *_: made.append(0))
    run = RunConfig.model_validate({"weights": {"encoding": encoding}})
    about = {"cluster": SimpleNamespace(absence_s=1.0), "run": run, "weights_folder": tmp_path / "store"}
    context: Any = SimpleNamespace(remote=True, one_machine=True, wire_type="bfloat16", **about)
    monkeypatch.setattr(assembly, "resolve_model", lambda path: path)
    for number in (1, 2):
        fill(WeightStore(tmp_path / "store"), *lay_out(number, [("w", torch.ones(number))]))
    looks, newest = [], WeightStore.newest_verified
    monkeypatch.setattr(WeightStore, "newest_verified", lambda store: (looks.append(0), newest(store))[1])
    relay = assembly.make_relay(context, None)  # type: ignore[arg-type]
    assert len(looks) == (encoding == "delta")
    assert relay.store.newest_verified() == (2 if encoding == "delta" else None)
    assert not relay.store.has(1) and made == []
    relay.store.clear()
    assembly.make_relay(context, None)  # type: ignore[arg-type]
    assert made == ([0] if encoding == "delta" else [])
