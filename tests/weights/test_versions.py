"""Weights arrive bit-equal or not at all."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
import torch

from streamrl.weights import publisher, version_store
from streamrl.weights.publisher import code
from streamrl.weights.version import CorruptWeights, Manifest, Part, lay_out
from streamrl.weights.version_store import WeightStore
from tests.weights.world import fill, flip_a_bit


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
    draft = store.begin(manifest)
    draft.buffer[:] = buffer
    draft.buffer[100] ^= 4
    with pytest.raises(CorruptWeights, match=r"tensor 'embed' is corrupt"):
        store.commit(draft)
    with pytest.raises(FileNotFoundError):
        store.open(1)
    store.abandon(draft)
    fill(store, manifest, buffer)
    read_manifest, read_buffer = store.open(1)
    assert read_manifest == manifest
    np.testing.assert_array_equal(read_buffer, buffer)
    store.keep_only({2})
    assert not list(store.directory.glob("version_1*"))


def put(store: WeightStore, number: int, seed: int) -> tuple[Manifest, np.ndarray]:
    manifest, buffer = lay_out(number, some_tensors(seed).items())
    fill(store, manifest, buffer)
    return manifest, buffer


def test_what_an_earlier_process_left_is_verified_before_it_is_trusted(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    for number in (1, 2, 3):
        put(WeightStore(directory), number, seed=number)
    (directory / "partial_4.bin").write_bytes(b"half")
    damaged = bytearray((directory / "version_3.bin").read_bytes())
    damaged[200] ^= 1
    (directory / "version_3.bin").write_bytes(damaged)
    (directory / "version_2.bin").write_bytes((directory / "version_2.bin").read_bytes()[:-64])
    store = WeightStore(directory)
    assert store.newest_verified() == 1
    assert not (directory / "version_3.bin").exists()
    (directory / "version_1.bin").write_bytes(damaged)
    assert store.newest_verified() == 1  # it has seen it whole, and is its only writer
    store.distrust(1)
    assert store.newest_verified() is None


@pytest.mark.parametrize(("keep", "damaged", "kept"), [(True, False, 3), (True, True, 2), (False, False, None)])
def test_of_an_earlier_processs_store_at_most_the_newest_whole_version_is_kept(
    tmp_path: Path, keep: bool, damaged: bool, kept: int | None
) -> None:
    directory = tmp_path / "store"
    for number in (1, 2, 3):
        put(WeightStore(directory), number, seed=number)
    for name in ("partial_4.bin", "spare.bin"):
        (directory / name).write_bytes(b"half")
    if damaged:
        flip_a_bit(directory / "version_3.bin", 200)
    store = WeightStore(directory)
    store.claim(keep)
    assert store.newest_verified() == kept
    names = set() if kept is None else {f"version_{kept}.bin", f"version_{kept}.json"}
    assert {path.name for path in directory.iterdir()} == names


def test_a_version_whose_bytes_have_changed_since_is_no_version(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    manifest, buffer = lay_out(4, some_tensors().items())
    draft = store.begin(manifest)
    draft.buffer[:] = buffer
    assert not store.is_whole(4)  # not committed
    store.commit(draft)
    assert store.is_whole(4) and store.newest_verified() == 4
    path = tmp_path / "version_4.bin"
    content = bytearray(path.read_bytes())
    content[17] ^= 4
    path.write_bytes(content)
    assert not store.is_whole(4)
    assert not path.exists() and store.newest_verified() is None


def test_a_version_that_cannot_be_read_at_the_moment_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(WeightStore(tmp_path), 1, seed=1)
    store = WeightStore(tmp_path)

    def opened(path: Path, flags: int) -> BinaryIO:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as full:
        full.setattr(version_store, "_opened", opened)
        with pytest.raises(OSError, match="Too many open files"):
            store.is_whole(1)
        assert store.newest_verified() is None
    assert store.is_whole(1) and store.newest_verified() == 1


def test_what_is_no_file_of_this_user_is_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, path = WeightStore(tmp_path), tmp_path / "version_1.bin"
    put(store, 1, seed=1)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert not store.is_whole(1) and not path.is_symlink()
    put(store, 1, seed=1)
    with monkeypatch.context() as foreign:
        user = os.geteuid()
        foreign.setattr(store, "_check_folder", lambda: None)
        foreign.setattr(os, "geteuid", lambda: user + 1)
        assert not store.is_whole(1)
    assert not path.exists()


def test_a_base_stays_while_the_next_version_is_made_from_it(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "store")
    _, old = put(store, 1, seed=1)
    manifest, buffer = lay_out(2, some_tensors(2).items())
    draft = store.begin(manifest, base=1)
    np.testing.assert_array_equal(draft.buffer, old)
    store.keep_only(set())
    assert store.newest_verified() == 1
    draft.buffer[:] = buffer
    np.testing.assert_array_equal(store.open(1)[1], old)  # a copy was changed, not the base
    store.commit(draft)
    store.keep_only({2})
    assert sorted(path.name for path in store.directory.iterdir()) == ["spare.bin", "version_2.bin", "version_2.json"]
    with pytest.raises(FileNotFoundError):
        store.begin(lay_out(3, some_tensors(3).items())[0], base=1)
    assert store.newest_verified() == 2


@pytest.mark.parametrize("reader", [None, "open", "mapped", "elsewhere"])
def test_memory_serves_again_only_when_nobody_reads_it(tmp_path: Path, reader: str | None) -> None:
    store = WeightStore(tmp_path / "store", one_machine=reader != "elsewhere")
    _, old = put(store, 1, seed=1)
    # A second name keeps the file of version 1 alive, so that no new file gets its number.
    of_old = tmp_path / "version 1"
    os.link(store.directory / "version_1.bin", of_old)
    held = WeightStore(store.directory).open(1)[1] if reader == "mapped" else None
    script = f"file = open({str(store.directory / 'version_1.bin')!r}); print(flush=True); input()"
    other = None
    if reader == "open":
        other = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert other.stdout
        other.stdout.readline()
    put(store, 2, seed=2)
    store.keep_only({2})
    manifest, buffer = lay_out(3, some_tensors(3).items())
    source = tmp_path / "published"
    source.write_bytes(buffer.tobytes())
    draft = store.begin(manifest, file=str(source))
    np.testing.assert_array_equal(draft.buffer, buffer)
    again = draft.path.samefile(of_old)
    if other:
        other.communicate(b"\n")
    assert again == (reader is None)
    if held is not None:
        np.testing.assert_array_equal(held, old)
    store.commit(draft)
    assert store.newest_verified() == 3 and store.is_whole(2)


def test_memory_that_serves_again_shows_nothing_of_before(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "store")
    put(store, 1, seed=1)
    store.keep_only(set())
    assert not store.begin(lay_out(2, some_tensors(2).items())[0]).buffer.any()  # deltas may be applied to it


def test_a_part_that_does_not_fit_its_manifest_is_refused() -> None:
    manifest, buffer = lay_out(2, some_tensors().items())
    part, _ = code(manifest, buffer, None)
    values = part.to_dict()
    assert Part.from_dict(values, manifest) == part
    assert Part.from_dict(Part.of_buffer(manifest).to_dict(), manifest) == Part.of_buffer(manifest)
    with pytest.raises(CorruptWeights, match="payloads for"):
        Part.from_dict(values | {"payloads": values["payloads"][1:]}, manifest)
    with pytest.raises(CorruptWeights, match="larger than its tensor"):
        Part.from_dict(values | {"payloads": [[10**9, "x"]] * len(manifest.tensors)}, manifest)
    with pytest.raises(CorruptWeights, match="not coded"):
        Part.from_dict({"number": 1, "base": None, "payloads": None}, manifest)
    with pytest.raises(CorruptWeights, match="malformed"):
        Part.from_dict({"number": 1}, manifest)


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (8, 2), (100, 8)])
def test_a_quarter_of_the_cores_that_may_be_used_code_a_version_and_none_but_its_own_thread_a_small_one(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int
) -> None:
    asked: list[int] = []
    pool = publisher.ThreadPoolExecutor
    monkeypatch.setattr(publisher, "usable_cores", lambda: cores)
    monkeypatch.setattr(publisher, "ThreadPoolExecutor", lambda most: asked.append(most) or pool(most))
    manifest, buffer = lay_out(1, some_tensors().items())
    monkeypatch.setattr(publisher, "THREADS_FROM_BYTES", manifest.nbytes + 1)
    part, stream = code(manifest, buffer, None)
    assert asked == []
    monkeypatch.setattr(publisher, "THREADS_FROM_BYTES", manifest.nbytes)
    again, same = code(manifest, buffer, None)
    assert asked == [threads]
    assert again == part and same.tobytes() == stream.tobytes()
