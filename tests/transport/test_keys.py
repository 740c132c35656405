"""Key files: how they are made, what is refused, and the command."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import zmq
from click.testing import CliRunner, Result

from streamrl.cli.keys import command
from streamrl.config.load import load_cluster
from streamrl.errors import UserError
from streamrl.launcher.preflight import check_keys
from streamrl.transport import curve
from streamrl.transport.curve import (
    ClientSecurity,
    KeyPair,
    ServerSecurity,
    load_own,
    load_public,
    make_keys,
)

CLUSTER = """
hardware: cpu
sites:
  home: {address: 127.0.0.1, port: 5000, trainer: {}}
  east: {generation: [{}]}
  west: {generation: [{}]}
links:
- {between: [home, east], bandwidth_gbit_s: 1, rtt_ms: 40}
- {between: [home, west], bandwidth_gbit_s: 1, rtt_ms: 90}
security: {keys: secrets/keys}
"""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_keys_load_as_they_were_made(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "keys"
    assert make_keys(folder, "east")
    pair = load_own(folder, "east")
    assert zmq.curve_public(pair.secret) == pair.public == load_public(folder, "east")
    assert (mode(folder), mode(folder / "east.key"), mode(folder / "east.key_secret")) == (0o700, 0o644, 0o600)
    assert sorted(path.name for path in folder.iterdir()) == ["east.key", "east.key_secret"]


def test_a_secret_is_its_owners_alone_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = curve.create_certificates
    seen: list[int] = []

    def looked_at(folder: str, name: str) -> tuple[str, str]:
        seen.append(mode(Path(folder) / f"{name}.key_secret"))
        return made(folder, name)

    monkeypatch.setattr(curve, "create_certificates", looked_at)
    make_keys(tmp_path, "east")
    assert seen == [0o600]


def test_a_secret_is_never_shown() -> None:
    pair = KeyPair(*zmq.curve_keypair())
    assert pair.secret.decode() not in repr(pair) + str(ServerSecurity(pair, {})) + f"{ClientSecurity(pair, b'')}"
    assert pair.public.decode() in repr(pair)


def test_keys_are_kept_unless_they_are_to_be_replaced(tmp_path: Path) -> None:
    make_keys(tmp_path, "east")
    before = load_own(tmp_path, "east")
    assert not make_keys(tmp_path, "east")
    assert load_own(tmp_path, "east") == before
    assert make_keys(tmp_path, "east", replace=True)
    assert load_own(tmp_path, "east") != before


def test_another_sites_public_key_is_not_overwritten(tmp_path: Path) -> None:
    make_keys(tmp_path, "east")
    (tmp_path / "east.key_secret").unlink()  # as at every site but its own
    assert not make_keys(tmp_path, "east")


def test_a_missing_key_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"east\.key_secret: no such file.*here: streamrl keys --cluster F --site east"):
        load_own(tmp_path, "east")
    with pytest.raises(UserError, match=r"east\.key: no such file; copy it from site 'east', where this makes it: "):
        load_public(tmp_path, "east")
    make_keys(tmp_path, "east")
    (tmp_path / "east.key_secret").unlink()
    with pytest.raises(UserError, match=r"copy it anew.* keys --cluster F --site east --replace"):
        load_own(tmp_path, "east")


@pytest.mark.parametrize("wrong", [0o640, 0o604, 0o620, 0o666])
def test_a_secret_open_to_others_is_refused_with_the_fix(tmp_path: Path, wrong: int) -> None:
    make_keys(tmp_path, "east")
    secret = tmp_path / "east.key_secret"
    secret.chmod(wrong)
    with pytest.raises(UserError, match=f"mode {wrong:04o} .*chmod 600 {secret}"):
        load_own(tmp_path, "east")
    secret.chmod(0o400)
    assert load_own(tmp_path, "east")


def test_a_public_key_that_others_may_change_is_refused(tmp_path: Path) -> None:
    make_keys(tmp_path, "east")
    (tmp_path / "east.key").chmod(0o664)
    with pytest.raises(UserError, match=r"mode 0664 makes it writable by others.*chmod 644"):
        load_public(tmp_path, "east")


@pytest.mark.parametrize(
    "text", ["", "curve\n", 'public-key = "short"\n', "public-key\n", "public-key = \xff" + "x" * 39, "\0" * 400]
)
def test_a_malformed_file_is_refused(tmp_path: Path, text: str) -> None:
    for name, load in (("east.key", load_public), ("east.key_secret", load_own)):
        path = tmp_path / name
        path.write_bytes(text.encode("latin-1"))
        path.chmod(0o600)
        with pytest.raises(UserError, match=f"{name}: it holds no"):
            load(tmp_path, "east")


def test_a_secret_and_a_public_key_must_be_a_pair(tmp_path: Path) -> None:
    make_keys(tmp_path, "east")
    make_keys(tmp_path, "west")
    secret = tmp_path / "east.key_secret"
    own, other = load_own(tmp_path, "east"), load_own(tmp_path, "west")
    (tmp_path / "east.key").write_bytes((tmp_path / "west.key").read_bytes())
    with pytest.raises(UserError, match=r"not the public key of east\.key_secret"):
        load_own(tmp_path, "east")
    secret.write_bytes(secret.read_bytes().replace(own.secret, other.secret))
    with pytest.raises(UserError, match="no pair"):
        load_own(tmp_path, "east")
    secret.write_bytes(secret.read_bytes().replace(other.secret, b"?"))
    with pytest.raises(UserError, match="no pair"):
        load_own(tmp_path, "east")


def test_a_folder_in_place_of_a_key_is_said(tmp_path: Path) -> None:
    (tmp_path / "east.key").mkdir(mode=0o700)
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        load_public(tmp_path, "east")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write the keys of site 'west'"):
        make_keys(tmp_path / "file", "west")


def test_security_of_both_ends_is_loaded_and_a_shared_key_refused(tmp_path: Path) -> None:
    for site in ("home", "east", "west"):
        make_keys(tmp_path, site)
    server = ServerSecurity.load(tmp_path, "home", ["east", "west"])
    client = ClientSecurity.load(tmp_path, "east", "home")
    assert server.allowed[client.own.public] == "east"
    assert client.server == server.own.public
    (tmp_path / "west.key").write_bytes((tmp_path / "east.key").read_bytes())
    with pytest.raises(UserError, match="'east' and 'west' have the same key"):
        ServerSecurity.load(tmp_path, "home", ["east", "west"])


@pytest.mark.parametrize("named", ["secrets/keys", "own", "/etc/keys"])
def test_the_folder_is_relative_to_the_cluster_file(tmp_path: Path, named: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER.replace("secrets/keys", named))
    assert load_cluster(file).security.keys == str(tmp_path / named)


def keys(folder: Path, *arguments: str) -> Result:
    file = folder / "cluster.yaml"
    file.write_text(CLUSTER)
    return CliRunner().invoke(command, ["--cluster", str(file), *arguments])


def test_the_command_makes_every_sites_keys_and_says_where_they_go(tmp_path: Path) -> None:
    result = keys(tmp_path)
    assert result.exit_code == 0, result.output
    for site in ("home", "east", "west"):
        assert load_own(tmp_path / "secrets/keys", site)
        assert f"{site}: made" in result.output
        assert f"Only to {site}: {site}.key_secret" in result.output
    assert "To every site: home.key, east.key, west.key" in result.output
    assert "east: kept" in keys(tmp_path).output


def test_the_command_makes_only_the_named_sites_keys(tmp_path: Path) -> None:
    assert "west: made" in keys(tmp_path, "--site", "west").output
    folder = tmp_path / "secrets/keys"
    assert sorted(path.name for path in folder.iterdir()) == ["west.key", "west.key_secret"]
    said = keys(tmp_path, "--site", "west").output
    assert "Only to west: west.key_secret" in said and "east.key_secret" not in said
    assert "To every other site: west.key\n" in said
    assert "Still to be copied here: east.key, from east" in said and "here: west.key" not in said
    before = load_own(folder, "west")
    (folder / "west.key_secret").unlink()
    assert "west: kept, its public key is here, but not its secret one" in keys(tmp_path, "--site", "west").output
    assert "Runs that go on" not in keys(tmp_path, "--site", "west").output
    assert "Runs that go on: end them at all sites" in keys(tmp_path, "--replace", "--site", "west").output
    assert load_own(folder, "west") != before


def test_the_command_names_sites_near_an_unknown_one(tmp_path: Path) -> None:
    result = keys(tmp_path, "--site", "wset")
    assert isinstance(result.exception, UserError)
    assert "no site 'wset'; did you mean west" in str(result.exception)
    assert not (tmp_path / "secrets").exists()


def test_a_cluster_of_one_site_needs_no_keys(tmp_path: Path) -> None:
    file = tmp_path / "one.yaml"
    file.write_text("hardware: cpu\nsites:\n  home: {trainer: {}, generation: [{}]}\nsecurity: {keys: secrets}\n")
    result = CliRunner().invoke(command, ["--cluster", str(file)])
    assert result.exit_code == 0 and "has one site, which needs no keys" in result.output
    assert not (tmp_path / "secrets").exists()


def test_a_start_names_all_missing_keys_and_where_each_is_made(tmp_path: Path) -> None:
    keys(tmp_path, "--site", "home")
    cluster = load_cluster(tmp_path / "cluster.yaml")
    home = list(check_keys(cluster, "home"))
    assert [line.split(": ")[0].rpartition("/")[2] for line in home] == ["east.key", "west.key"]
    (tmp_path / "secrets/keys/home.key").unlink()
    east = "\n".join(check_keys(cluster, "east", "my file.yaml"))
    assert "needs its own keys, make them here: streamrl keys --cluster 'my file.yaml' --site east" in east
    assert "home.key: no such file; copy it from site 'home', where this makes it: streamrl keys" in east
    keys(tmp_path, "--replace")
    assert not [*check_keys(cluster, "east"), *check_keys(cluster, "home")]
    (tmp_path / "secrets/keys/west.key").write_bytes((tmp_path / "secrets/keys/east.key").read_bytes())
    assert "'east' and 'west' have the same key" in "".join(check_keys(cluster, "home"))
