"""Commands in messages can be pasted into a shell, whatever the run's folder is called."""

from __future__ import annotations

import errno
import shlex
import signal
from pathlib import Path
from typing import NoReturn

import pytest

from streamrl.config.load import RESOLVED_NAME, load_cluster
from streamrl.config.run import RunConfig
from streamrl.config.trackers import TensorBoardTracker
from streamrl.errors import UserError
from streamrl.launcher import supervisor
from streamrl.launcher.site_setup import Share
from streamrl.run_dir.checkpoints import _missing
from streamrl.run_dir.status import read_status
from streamrl.trackers.tracker_group import TrackerGroup

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["tiny", "my runs/tiny", "it's/tiny", "a&b/tiny", "$x/tiny"])
def test_a_command_in_a_message_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    run_dir = tmp_path / name
    run_dir.mkdir(parents=True)
    (run_dir / RESOLVED_NAME).touch()

    def interrupted(folder: Path) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(supervisor, "write_report", interrupted)
    cluster = load_cluster(ROOT / "cluster_configs" / "local.yaml")
    resume = ["streamrl", "launch", "--resume", str(run_dir)]
    assert pasted(supervisor._how_to_resume(Share(cluster, RunConfig(), {"here": run_dir})), "with: ") == resume
    [line] = supervisor._report(run_dir, supervisor.StopRequests([signal.SIGTERM]))
    assert pasted(line, "`", "`") == ["streamrl", "report", str(run_dir)]
    with pytest.raises(UserError) as error:
        read_status(run_dir)
    assert pasted(str(error.value), "with: ", " (with") == resume
    lost = str(_missing(run_dir / "step_3", None))
    assert pasted(lost, "with: ", " (see") == ["mkdir", "-p", str(run_dir / "lost_step_3")]
    monkeypatch.setattr(TrackerGroup, "_start", no_process)
    line = TrackerGroup(run_dir, [TensorBoardTracker()]).look()[0]
    assert pasted(line, "by: ") == ["streamrl", "track", str(run_dir), "tensorboard"]


def no_process(group: TrackerGroup, name: str) -> NoReturn:
    raise OSError(errno.EAGAIN, "no process is left")


def pasted(message: str, after: str, before: str = "\n") -> list[str]:
    """The words that a shell makes of the command in a message, which stands between these texts."""
    return shlex.split(message.partition(after)[2].partition(before)[0])
