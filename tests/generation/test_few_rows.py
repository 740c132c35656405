"""Products with a few rows: as torch computes them, in memory that is bounded, and left to vLLM without a compiler."""

from __future__ import annotations

import errno
import functools
import json
import mmap
import os
import pickle
import re
from pathlib import Path

import pytest
import torch

from streamrl.errors import UserError
from streamrl.generation.instance import few_rows
from streamrl.generation.instance.few_rows import HUGE_PAGE, OPERATION, Products, Shelf, multiply, products
from streamrl.machine import compiled_c
from streamrl.machine.cpu import this_cpu
from streamrl.scratch_folders import ScratchFolder

ACCESS = os.access


def _arranged(weight: torch.Tensor) -> torch.Tensor:
    """Weights as `multiply` reads them."""
    found = products(weight.dtype)
    assert found is not None and found.fits(weight)
    return found.arrange(weight, torch.empty(weight.shape, dtype=weight.dtype))


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (5, 7), (33, 64), (10, 1001), (192, 576)])
def test_a_product_is_that_of_torch(outputs: int, inputs: int) -> None:
    found = products(torch.float32)
    assert found is not None, "no C compiler on this machine"
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator)
    for rows in range(1, found.most_rows + 1):
        x = torch.randn(rows, inputs + 1, generator=generator)[:, :-1]  # not contiguous
        exact = x.double() @ weight.double().T
        assert (multiply(x, _arranged(weight)) - exact).abs().max() <= 1e-5 * inputs**0.5
        bias = torch.randn(outputs, generator=generator)
        assert (OPERATION(x, _arranged(weight), bias) - exact - bias).abs().max() <= 1e-5 * inputs**0.5


@pytest.fixture(scope="module")
def cache_of_others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of libraries that are compiled with other flags."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (48, 64), (960, 576), (64, 1536)])
@pytest.mark.parametrize("has_tiles", [True, False])
def test_a_product_in_bf16_is_rounded_once(
    has_tiles: bool, outputs: int, inputs: int, cache_of_others: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = this_cpu().flags
    if not has_tiles and "amx_bf16" in flags:  # as for a CPU without
        monkeypatch.setattr(compiled_c, "cache_directory", lambda: cache_of_others)
        monkeypatch.setattr(compiled_c, "FLAGS", (*compiled_c.FLAGS, "-mno-amx-bf16"))
        monkeypatch.setattr(few_rows, "products", functools.cache(products.__wrapped__))
    found = few_rows.products(torch.bfloat16)
    assert (found is not None) == ("avx512_bf16" in flags), "this CPU multiplies bf16, and no product was made"
    if found is None:
        return
    assert found.most_rows == (32 if has_tiles and "amx_bf16" in flags else 8)
    generator = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(*size, generator=generator).bfloat16() for size in ((outputs, inputs), (outputs,)))
    arranged = _arranged(weight)
    for rows in range(1, found.most_rows + 1):
        x = torch.randn(rows, inputs, generator=generator).bfloat16()
        exact = x.double() @ weight.double().T
        out = torch.full((rows + 1, outputs), 7.0, dtype=torch.bfloat16)
        for added in (None, bias, bias.float()):  # vLLM's layers may hold a bias in fp32
            want = exact if added is None else exact + added.double()
            multiply(x, arranged, added, out=out[:rows])
            error = (out[:rows].double() - want).abs()
            assert (error <= 2**-8 * want.abs() + 1e-6 * inputs**0.5).all(), rows  # half a unit of the last of 8 bits
            assert (out[rows] == 7.0).all(), "written beyond its rows"
        torch.nn.functional.linear(x, weight)  # oneDNN sets AMX's tiles otherwise


def test_weights_that_do_not_fit_into_panels_have_no_product_in_bf16() -> None:
    found = products(torch.bfloat16)
    if found is None:
        assert "avx512_bf16" not in this_cpu().flags
        return
    sizes = {(16, 32): True, (8, 32): False, (24, 32): False, (16, 16): False, (16, 48): False, (0, 32): False}
    for size, fits in sizes.items():
        assert found.fits(torch.empty(size, dtype=torch.bfloat16)) == fits, size
    assert not found.fits(torch.empty(1, 16, 32, dtype=torch.bfloat16))
    assert not found.fits(torch.empty(16, 32, dtype=torch.bfloat16, device="meta"))


class Timed:
    """A library whose product takes so many seconds, by a clock of its own, with prefetching and without."""

    def __init__(self, with_s: float, without_s: float) -> None:
        self._name = "/cache/few-rows-1.so"
        self.now, self.reads, self._seconds, self._is_on = 0.0, 0, (without_s, with_s), 1

    def prefetch(self, is_on: bool) -> None:
        self._is_on = int(is_on)

    def few_rows(self, *_: object) -> None:
        self.reads += 1
        slower = 2 if self.reads > 2 else 1  # of a busy machine: the quickest count
        self.now += slower * self._seconds[self._is_on]


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STREAMRL_CACHE", str(tmp_path))
    monkeypatch.setattr(few_rows, "READ_BYTES", 1 << 20)
    return tmp_path


@pytest.mark.parametrize(("seconds", "gains"), [((1.0, 1.1), True), ((1.1, 1.0), False)])
def test_whether_weights_are_prefetched_is_measured_once(
    seconds: tuple[float, float], gains: bool, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Timed(*seconds)
    monkeypatch.setattr(few_rows.time, "thread_time", lambda: library.now)

    def chosen() -> bool:
        return few_rows._gains_by_prefetching(library, torch.float32)  # type: ignore[arg-type]

    assert chosen() is gains and library.reads == 2 * few_rows.TRIES
    assert chosen() is gains and library.reads == 2 * few_rows.TRIES
    (kept,) = (empty_cache / "machine").iterdir()
    values = json.loads(kept.read_text())
    assert (values["with_s"], values["without_s"]) == pytest.approx(seconds)
    kept.write_text("{")
    assert chosen() is gains and library.reads == 4 * few_rows.TRIES
    assert json.loads(kept.read_text())["gains"] is gains


@pytest.mark.parametrize("gains", [True, False])
def test_products_prefetch_as_was_measured(gains: bool, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[bool] = []
    loaded = compiled_c.load(few_rows.SOURCES[torch.float32], "")
    assert loaded is not None
    prefetch = loaded.prefetch

    def noted(is_on: bool) -> None:
        settings.append(is_on)
        prefetch(is_on)

    monkeypatch.setattr(loaded, "prefetch", noted)
    monkeypatch.setattr(few_rows, "_gains_by_prefetching", lambda *_: gains)
    monkeypatch.setattr(compiled_c, "load", lambda *_: loaded)
    assert products.__wrapped__(torch.float32) is not None
    assert settings == [gains]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefetching_changes_no_product(dtype: torch.dtype) -> None:
    found, loaded = products(dtype), compiled_c.load(few_rows.SOURCES[dtype], "")
    assert loaded is not None
    if found is None:
        assert dtype == torch.bfloat16 and "avx512_bf16" not in this_cpu().flags
        return
    generator = torch.Generator().manual_seed(0)
    weight = _arranged(torch.randn(64, 96, generator=generator).to(dtype))
    is_on = few_rows._gains_by_prefetching(loaded, dtype)
    try:
        for rows in range(1, found.most_rows + 1):
            x = torch.randn(rows, 96, generator=generator).to(dtype)
            kept = []
            for setting in (True, False):
                loaded.prefetch(setting)
                kept.append(multiply(x, weight))
            assert torch.equal(*kept) and kept[0].isfinite().all()
    finally:
        loaded.prefetch(is_on)


def test_there_are_no_products_of_other_types() -> None:
    assert products(torch.float16) is None and products(torch.int8) is None


def test_denormal_numbers_are_left_as_they_are() -> None:
    assert products(torch.float32) is not None
    assert torch.tensor(1e-40) * torch.tensor(0.5) > 0  # a library built with -ffast-math would have turned them off


def multiplied(found: Products | None, x: torch.Tensor, weight: torch.Tensor) -> list[list[float]]:
    """The product of one row by these products, which are not those of `multiply`."""
    assert found is not None
    y = torch.empty(1, len(weight))
    found.function(x.data_ptr(), weight.data_ptr(), None, y.data_ptr(), 1, *weight.shape)
    return y.tolist()


def test_without_a_compiler_there_is_no_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_c, "cache_directory", lambda: tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert products.__wrapped__(torch.float32) is None


@pytest.mark.parametrize(("folder_mode", "file_mode"), [(0o777, 0o700), (0o700, 0o766)])
def test_a_library_that_others_could_have_put_into_a_shared_cache_is_not_loaded(
    folder_mode: int, file_mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_c, "cache_directory", lambda: tmp_path)
    assert products.__wrapped__(torch.float32) is not None
    (library,) = (tmp_path / "compiled").iterdir()
    library.unlink()  # what is loaded stays as it is
    library.write_bytes(b"of somebody else")
    library.chmod(file_mode)
    library.parent.chmod(folder_mode)
    assert multiplied(products.__wrapped__(torch.float32), torch.ones(1, 4), torch.ones(2, 4)) == [[4.0, 4.0]]
    assert (library.read_bytes() == b"of somebody else") == (folder_mode == 0o777)


def scratch(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The temporary folders that are made from now on."""
    made: list[Path] = []

    class Noted(ScratchFolder):
        def __init__(self) -> None:
            super().__init__()
            made.append(self.path)

    monkeypatch.setattr(compiled_c, "ScratchFolder", Noted)
    return made


def test_a_cache_that_cannot_be_made_is_replaced_by_a_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(compiled_c, "cache_directory", lambda: tmp_path / "file")
    made = scratch(monkeypatch)
    found = products.__wrapped__(torch.float32)
    assert len(made) == 1
    assert multiplied(found, torch.ones(1, 4), torch.ones(2, 4)) == [[4.0, 4.0]]


def test_a_cache_that_is_only_read_is_used_if_it_has_the_library_and_replaced_if_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_c, "cache_directory", lambda: tmp_path)
    made = scratch(monkeypatch)
    assert products.__wrapped__(torch.float32) is not None
    monkeypatch.setattr(compiled_c.os, "access", lambda path, mode: False if mode == os.W_OK else ACCESS(path, mode))
    assert products.__wrapped__(torch.float32) is not None and made == []
    (library,) = (tmp_path / "compiled").iterdir()
    library.unlink()
    assert products.__wrapped__(torch.float32) is not None and len(made) == 1
    assert list((tmp_path / "compiled").iterdir()) == []


def test_without_a_folder_for_the_cache_there_is_no_product_and_no_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused() -> Path:
        raise UserError("this user has no home folder; set HOME to a folder of yours")

    monkeypatch.setattr(compiled_c, "cache_directory", refused)
    assert products.__wrapped__(torch.float32) is None
    assert "set HOME to a folder of yours" in caplog.text


def test_a_compiler_that_fails_is_told_and_leaves_no_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled_c, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(compiled_c, "FLAGS", ("-not-a-flag",))
    assert products.__wrapped__(torch.float32) is None
    assert "use vLLM's matrix products" in caplog.text


def test_the_buffer_pool_gets_huge_pages() -> None:
    taken = Shelf().take(torch.Size([1]), torch.float32)
    assert taken is not None
    maps = Path("/proc/self/smaps").read_text()
    areas = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) (\S+) (?:.*\n)+?VmFlags: (.*)$", maps, re.MULTILINE)
    (area,) = [one for one in areas if int(one[0], 16) <= taken.data_ptr() < int(one[1], 16)]
    assert area[2] == "rw-p", "the kernel has no huge pages for shared memory, unless told"
    assert "hg" in area[3].split(), "advised"


def test_a_kernel_without_huge_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(mmap.mmap):
        def madvise(self, *_: object) -> None:
            raise OSError(errno.EINVAL, "no huge pages")

    monkeypatch.setattr(mmap, "mmap", Small)
    taken = Shelf().take(torch.Size([4]), torch.float32)
    assert taken is not None
    taken.fill_(1.0)
    assert taken.sum() == 4


def test_the_buffer_pool_hands_out_distinct_tensors_up_to_its_size() -> None:
    shelf = Shelf(most=448 + 832 + 64)  # each a multiple of a line
    first = shelf.take(torch.Size([10, 10]), torch.float32)
    second = shelf.take(torch.Size([40, 10]), torch.bfloat16)
    assert first is not None and second is not None
    first.fill_(1.0)
    second.fill_(2.0)
    assert first.sum() == 100 and second.sum() == 800
    assert first.data_ptr() % HUGE_PAGE == 0 and second.data_ptr() % 64 == 0
    assert first.untyped_storage().data_ptr() == first.data_ptr() != second.untyped_storage().data_ptr()
    assert shelf.take(torch.Size([65]), torch.int8) is None
    assert shelf.take(torch.Size([1]), torch.int8) is not None


def test_without_memory_there_are_no_more_copies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(mmap.mmap):
        def __new__(cls, *_: object, **__: object) -> Full:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

    shelf = Shelf()
    monkeypatch.setattr(mmap, "mmap", Full)
    assert [shelf.take(torch.Size([4]), torch.float32) for _ in range(2)] == [None, None]
    (message,) = caplog.messages
    assert "Cannot allocate memory" in message


def test_a_tensor_larger_than_a_block_gets_a_block_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "SOME", 4096)
    shelf = Shelf()
    sizes = (3000, 9000, 2000)
    taken = [shelf.take(torch.Size([size]), torch.uint8) for size in sizes]
    for number, one in enumerate(taken):
        assert one is not None
        one.fill_(number)
    assert [int(one.max()) for one in taken if one is not None] == [0, 1, 2]


def test_the_buffer_pool_goes_to_an_engines_workers() -> None:
    taken = pickle.loads(pickle.dumps(Shelf(most=100))).take(torch.Size([4]), torch.bfloat16)
    assert taken is not None and taken.shape == (4,)
