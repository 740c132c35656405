"""A run takes the GPUs that its user may use, and nobody else's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from streamrl.errors import RunFailed, UserError
from streamrl.launcher.local_backend import start
from streamrl.machine import gpus
from streamrl.machine.gpus import devices_of_user, gpu_names, usable_devices
from streamrl.runtime.process_plan import ProcessSpec

FOUR = ["GPU-aa11", "GPU-ab22", "GPU-cc33", "GPU-dd44"]
PARTS = [*FOUR, "MIG-77aa", "MIG-88bb"]


@pytest.mark.parametrize(
    ("setting", "usable"),
    [
        (None, ["0", "1", "2", "3"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("3, 1", ["3", "1"]),
        ("GPU-cc,0", ["GPU-cc", "0"]),
        ("MIG-88bb", ["MIG-88bb"]),
    ],
)
def test_the_users_list_is_kept_in_its_order_with_numbers_and_names(setting: str | None, usable: list[str]) -> None:
    assert usable_devices(setting, PARTS) == usable


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("4", "got '4'; it has GPUs 0 to 3"),
        ("0,,1", "got ''"),
        ("GPU-a", "got 'GPU-a'"),  # two begin so
        ("GPU-ee", "got 'GPU-ee'"),
        ("1,GPU-ab22", "1 and GPU-ab22 are one device"),
        ("0,-1", "got '-1'"),
    ],
)
def test_an_entry_that_is_no_device_or_there_twice_is_an_error(setting: str, says: str) -> None:
    with pytest.raises(UserError, match=rf"^CUDA_VISIBLE_DEVICES={setting}: .*{says}"):
        usable_devices(setting, PARTS)


def test_positions_in_the_plan_are_positions_in_the_users_list() -> None:
    assert devices_of_user((0, 1), None) == "0,1"
    assert devices_of_user((1, 2), "4,5,GPU-cc33") == "5,GPU-cc33"
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES=4,5 has 2 devices, and this process needs its number 3"):
        devices_of_user((1, 2), "4,5")


def test_gpus_and_their_parts_are_read_from_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aa11)",
        "  MIG 1g.10gb     Device  0: (UUID: MIG-77aa)",
        "GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-ab22)",
    ]
    monkeypatch.setattr(gpus, "_nvidia_smi", lambda *options: lines)
    assert gpu_names() == ["GPU-aa11", "GPU-ab22", "MIG-77aa"]


@pytest.mark.parametrize(
    ("setting", "oldest"),
    [
        (None, (7, 5)),
        ("0", (8, 9)),
        ("1,0", (7, 5)),
        ("GPU-aa", (8, 9)),
        ("MIG-77aa", (8, 0)),
        ("2", (8, 0)),
        ("", None),
        ("7", None),
    ],
)
def test_the_oldest_gpu_is_one_that_may_be_used(
    setting: str | None, oldest: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = [
        "GPU 0: NVIDIA L4 (UUID: GPU-aa11)",
        "GPU 1: Tesla T4 (UUID: GPU-bb22)",
        "GPU 2: NVIDIA A100 (UUID: GPU-cc33)",
        "  MIG 1g.10gb     Device  0: (UUID: MIG-77aa)",
    ]
    asked = {"--list-gpus": listed, "--query-gpu=compute_cap,uuid": ["8.9, GPU-aa11", "7.5, GPU-bb22", "8.0, GPU-cc33"]}
    monkeypatch.setattr(gpus, "_nvidia_smi", lambda first, *_: asked[first])
    if setting is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert gpus.oldest_compute_capability() == oldest
    asked["--query-gpu=compute_cap,uuid"] = ['Field "compute_cap" is not a valid field to query.']
    assert gpus.oldest_compute_capability() is None


def test_the_drivers_library_is_asked_for_its_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import ctypes\nctypes.CDLL = lambda name: Library()\n" + gpus.DRIVER_CUDA
    library = "class Library:\n    cuInit = lambda self, flags: {works}\n"
    library += "    cuDriverGetVersion = lambda self, at: answer(at)\n"
    answer = "def answer(at):\n    at._obj.value = 13000\n    return 0\n"
    for works, found in ((0, 13000), (803, None)):  # 803: not this GPU with this library
        monkeypatch.setattr(gpus, "DRIVER_CUDA", answer + library.format(works=works) + program)
        assert gpus.cuda_of_driver() == found
    monkeypatch.setattr(gpus, "DRIVER_CUDA", "import ctypes; ctypes.CDLL('libnowhere.so.1')")
    assert gpus.cuda_of_driver() is None


def test_a_started_process_sees_devices_of_its_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    names = ["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"]
    look = [sys.executable, "-c", f"import os; print('sees', *filter(None, map(os.environ.get, {names})))"]

    def begin(*devices: int) -> str:
        process = start(ProcessSpec("trainer", "trainer", "here", None, look, gpu_ids=devices), tmp_path, False)
        assert process.process.wait(60) == 0
        return process.log.read_text().splitlines()[-1]

    assert begin(1) == "sees 7 PCI_BUS_ID", "numbers are those of nvidia-smi"
    assert begin() == "sees 6,7"  # one that asks for none keeps its user's
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert begin(1) == "sees 7 FASTEST_FIRST"
    with pytest.raises(RunFailed, match="cannot start trainer: CUDA_VISIBLE_DEVICES=6,7 has 2 devices"):
        begin(1, 2)
