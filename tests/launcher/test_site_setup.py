"""What a killed launch has left in a run folder is mended by the next one."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config.cluster import ClusterConfig
from streamrl.config.load import RESOLVED_NAME
from streamrl.config.run import RunConfig
from streamrl.launcher.site_setup import _with_keys, prepare
from streamrl.run_dir import layout
from streamrl.run_dir.instance_files import StartedProcess, WantedInstance, write_started, write_wanted
from streamrl.run_dir.start_stages import say
from streamrl.transport.curve import ClientSecurity, ServerSecurity, public_file, secret_file

LEFT = "0123456789abcdef"


def cluster() -> ClusterConfig:
    home = {"trainer": {}, "address": "127.0.0.1", "port": 7000}
    link = {"between": ["home", "far"], "bandwidth_gbit_s": 1, "rtt_ms": 10}
    return ClusterConfig.model_validate(
        {"hardware": "cpu", "sites": {"home": home, "far": {"generation": [{}]}}, "links": [link]}
    )


def test_sites_of_an_emulated_run_keep_their_keys(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    assert _with_keys(cluster(), folder).security.keys == str(folder.resolve())
    before = {path: path.read_bytes() for path in folder.iterdir()}
    _with_keys(cluster(), folder)
    assert len(before) == 4 and before == {path: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("file_of", [public_file, secret_file])
def test_a_site_that_has_one_of_its_two_keys_gets_both_anew(tmp_path: Path, file_of: object) -> None:
    _with_keys(cluster(), tmp_path)
    assert callable(file_of)
    file_of(tmp_path, "far").unlink()
    kept = secret_file(tmp_path, "home").read_bytes()
    half = tmp_path / ".new-abc"
    half.mkdir()
    (half / "far.key_secret").touch()
    _with_keys(cluster(), tmp_path)
    assert ServerSecurity.load(tmp_path, "home", ["far"]).allowed
    assert ClientSecurity.load(tmp_path, "far", "home").own.public
    assert secret_file(tmp_path, "home").read_bytes() == kept and not half.exists()


def test_what_killed_processes_have_left_of_files_that_they_replaced_is_deleted(tmp_path: Path) -> None:
    (tmp_path / layout.CHECKPOINTS).mkdir()
    names = [layout.STATUS, layout.METRICS, layout.REPLICAS, RESOLVED_NAME, f"{layout.CHECKPOINTS}/best.json"]
    left = [(tmp_path / name).with_name(f".{Path(name).name}.{LEFT}") for name in names]
    others = [tmp_path / f".{layout.REPORT}.{LEFT}", tmp_path / f".{layout.STATUS}"]
    for path in left + others:
        path.touch()
    one = ClusterConfig.model_validate({"hardware": "cpu", "sites": {"here": {"trainer": {}, "generation": [{}]}}})
    with prepare(one, RunConfig(), tmp_path):
        assert not any(path.exists() for path in left) and all(path.exists() for path in others)


def test_what_a_site_has_left_that_the_cluster_file_no_longer_has_is_not_taken_for_processes_of_this_launch(
    tmp_path: Path,
) -> None:
    old = tmp_path / layout.SITES / "old"
    (old / layout.LOGS).mkdir(parents=True)
    (old / layout.LOGS / "agents-old-workers.log").touch()
    write_started(old, [StartedProcess("service-old", "service", 1)])
    write_wanted(old, [WantedInstance("old-regular-0")])
    say(old, "service-old", "connecting")
    (old / layout.SITE_STATUS).write_text("{}")
    one = ClusterConfig.model_validate({"hardware": "cpu", "sites": {"here": {"trainer": {}, "generation": [{}]}}})
    with prepare(one, RunConfig(), tmp_path):
        left = {path.relative_to(old).as_posix() for path in old.rglob("*") if path.is_file()}
    assert left == {f"{layout.LOGS}/agents-old-workers.log"}
