"""What a killed launch has left in a run folder is mended by the next one."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config.cluster import ClusterConfig
from streamrl.launcher.site_setup import _with_keys
from streamrl.transport.curve import ClientSecurity, ServerSecurity, public_file, secret_file


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
