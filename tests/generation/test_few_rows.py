"""Products with a few rows: as torch computes them, in memory that is bounded, and left to vLLM without a compiler."""

from __future__ import annotations

import errno
import mmap
import os
import re
from pathlib import Path

import pytest
import torch

from streamrl.errors import UserError
from streamrl.generation.instance.few_rows import HUGE_PAGE, MOST_ROWS, Shelf, multiply, product
from streamrl.machine import compiled_c
from streamrl.scratch_folders import ScratchFolder

ACCESS = os.access


@pytest.mark.parametrize("rows", range(1, MOST_ROWS + 1))
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (5, 7), (33, 64), (10, 1001), (192, 576)])
def test_a_product_is_that_of_torch(rows: int, outputs: int, inputs: int) -> None:
    function = product()
    assert function is not None, "no C compiler on this machine"
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inputs + 1, generator=generator)[:, :-1]  # not contiguous
    weight = torch.randn(outputs, inputs, generator=generator)
    exact = x.double() @ weight.double().T
    assert (multiply(function, x, weight) - exact).abs().max() <= 1e-5 * inputs**0.5


def test_denormal_numbers_are_left_as_they_are() -> None:
    assert product() is not None
    assert torch.tensor(1e-40) * torch.tensor(0.5) > 0  # a library built with -ffast-math would have turned them off


def test_without_a_compiler_there_is_no_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_c, "cache_directory", lambda: tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert product.__wrapped__() is None


@pytest.mark.parametrize(("folder_mode", "file_mode"), [(0o777, 0o700), (0o700, 0o766)])
def test_a_library_that_others_could_have_put_into_a_shared_cache_is_not_loaded(
    folder_mode: int, file_mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_c, "cache_directory", lambda: tmp_path)
    assert product.__wrapped__() is not None
    (library,) = (tmp_path / "compiled").iterdir()
    library.unlink()  # what is loaded stays as it is
    library.write_bytes(b"of somebody else")
    library.chmod(file_mode)
    library.parent.chmod(folder_mode)
    function = product.__wrapped__()
    assert function is not None
    x, weight = torch.ones(1, 4), torch.ones(2, 4)
    assert multiply(function, x, weight).tolist() == [[4.0, 4.0]]
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
    function = product.__wrapped__()
    assert function is not None and len(made) == 1
    assert multiply(function, torch.ones(1, 4), torch.ones(2, 4)).tolist() == [[4.0, 4.0]]


def test_a_cache_that_is_only_read_is_used_if_it_has_the_library_and_replaced_if_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_c, "cache_directory", lambda: tmp_path)
    made = scratch(monkeypatch)
    assert product.__wrapped__() is not None
    monkeypatch.setattr(compiled_c.os, "access", lambda path, mode: False if mode == os.W_OK else ACCESS(path, mode))
    assert product.__wrapped__() is not None and made == []
    (library,) = (tmp_path / "compiled").iterdir()
    library.unlink()
    assert product.__wrapped__() is not None and len(made) == 1
    assert list((tmp_path / "compiled").iterdir()) == []


def test_without_a_folder_for_the_cache_there_is_no_product_and_no_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused() -> Path:
        raise UserError("this user has no home folder; set HOME to a folder of yours")

    monkeypatch.setattr(compiled_c, "cache_directory", refused)
    assert product.__wrapped__() is None
    assert "set HOME to a folder of yours" in caplog.text


def test_a_compiler_that_fails_is_told_and_leaves_no_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled_c, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(compiled_c, "FLAGS", ("-not-a-flag",))
    assert product.__wrapped__() is None
    assert "use vLLM's matrix products" in caplog.text


def test_the_buffer_pool_gets_huge_pages() -> None:
    taken = Shelf().take(torch.Size([1]))
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
    taken = Shelf().take(torch.Size([4]))
    assert taken is not None
    taken.fill_(1.0)
    assert taken.sum() == 4


def test_the_buffer_pool_hands_out_distinct_tensors_up_to_its_size() -> None:
    shelf = Shelf(most=4 * 300)
    first, second = shelf.take(torch.Size([10, 10])), shelf.take(torch.Size([20, 10]))
    assert first is not None and second is not None
    first.fill_(1.0)
    second.fill_(2.0)
    assert first.sum() == 100 and second.sum() == 400
    assert first.data_ptr() % HUGE_PAGE == 0
    assert shelf.take(torch.Size([1])) is None
