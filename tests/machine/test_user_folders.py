"""Folders for what is kept between commands, where there is a home folder and where there is none."""

from __future__ import annotations

import os
import pwd
import tempfile
from pathlib import Path

import pytest

from streamrl.environments.installed import environments_folder
from streamrl.errors import UserError
from streamrl.machine.user_folders import cache_directory, is_own, settle_caches


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files of a user without a home folder: neither HOME nor an entry in /etc/passwd."""
    for name in ("HOME", "STREAMRL_CACHE", "STREAMRL_ENVIRONMENTS", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_user_with_a_home_folder_has_its_usual_ones(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = temporary / "home" / "me"
    monkeypatch.setenv("HOME", str(home))  # it can be made
    assert cache_directory() == home / ".cache/streamrl"
    assert environments_folder() == home / ".local/share/streamrl/environments"
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    monkeypatch.setenv("XDG_DATA_HOME", "/d")
    assert (cache_directory(), environments_folder()) == (Path("/c/streamrl"), Path("/d/streamrl/environments"))
    assert list(temporary.iterdir()) == []


def test_a_user_without_a_home_folder_has_one_among_temporary_files(temporary: Path) -> None:
    own = temporary / f"streamrl-{os.geteuid()}"
    assert cache_directory() == own
    assert own.stat().st_mode & 0o777 == 0o700
    (own / "kept").touch()
    assert cache_directory() == own and (own / "kept").exists()
    assert environments_folder() == own / "environments"


@pytest.mark.parametrize("home", ["/", "closed", "closed/gone", "", "file"])
def test_a_home_folder_to_which_the_user_cannot_write_is_none(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    (temporary / "closed").mkdir()
    (temporary / "file").touch()
    closed = {"/", str(temporary / "closed")}
    # the tests may run as root, who may write anywhere
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) not in closed)
    monkeypatch.setenv("HOME", str(temporary / home) if home else "")
    own = temporary / f"streamrl-{os.geteuid()}"
    assert (cache_directory(), environments_folder()) == (own, own / "environments")
    if home == "closed":  # somebody with the right to has put a cache there, to be read
        (temporary / "closed" / ".cache" / "streamrl").mkdir(parents=True)
        assert cache_directory() == temporary / "closed" / ".cache" / "streamrl"


@pytest.mark.parametrize("home", ["", "closed", "open"])
def test_libraries_get_a_place_for_their_caches_where_there_is_no_home(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    if home:
        (temporary / home).mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) not in ("/", str(temporary / "closed")))
    monkeypatch.setenv("HOME", str(temporary / home) if home else "")
    names = ("VLLM_CACHE_ROOT", "MPLCONFIGDIR")
    for name in (*names, "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    own = temporary / f"streamrl-{os.geteuid()}"
    with monkeypatch.context() as environment:
        environment.setattr(os, "environ", dict(os.environ))
        settle_caches()
        expected = [None, None] if home == "open" else [str(own / "vllm"), str(own / "matplotlib")]
        assert [os.environ.get(name) for name in names] == expected
    given = {"MPLCONFIGDIR": "/mine", "XDG_CACHE_HOME": "/cache"}
    with monkeypatch.context() as environment:
        environment.setattr(os, "environ", dict(os.environ) | given)
        settle_caches()
        assert (os.environ["MPLCONFIGDIR"], os.environ.get("VLLM_CACHE_ROOT")) == ("/mine", None)


@pytest.mark.parametrize(
    ("closed", "elsewhere"),
    [
        (".cache/vllm", ["VLLM_CACHE_ROOT"]),
        (".config/matplotlib", ["MPLCONFIGDIR"]),
        (".cache/matplotlib", ["MPLCONFIGDIR"]),
        (".cache/streamrl", []),
    ],
)
def test_a_librarys_folder_to_which_the_user_cannot_write_is_not_used(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, closed: str, elsewhere: list[str]
) -> None:
    (temporary / closed).mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(temporary / closed))
    environment = {"HOME": str(temporary)}
    monkeypatch.setattr(os, "environ", environment)
    settle_caches()
    assert sorted(environment) == sorted(["HOME", *elsewhere])
    monkeypatch.setattr(
        os, "environ", given := {"HOME": str(temporary), "XDG_CACHE_HOME": "/c", "XDG_CONFIG_HOME": "/d"}
    )
    settle_caches()
    assert len(given) == 3


def test_root_keeps_its_folders_where_its_home_is_the_root_folder(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/")
    monkeypatch.setattr(os, "access", lambda path, mode: True)
    assert cache_directory() == Path("/.cache/streamrl")
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("what", ["link", "file", "writable", "of another user"])
def test_a_folder_that_is_not_this_users_alone_is_refused(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    own = temporary / f"streamrl-{os.geteuid()}"
    if what == "link":
        (temporary / "mine").mkdir(mode=0o700)
        own.symlink_to("mine")
    elif what == "file":
        own.touch(mode=0o600)
    else:
        own.mkdir()
        own.chmod(0o720 if what == "writable" else 0o700)
    if what == "of another user":
        other = os.geteuid() + 1
        own.rename(temporary / f"streamrl-{other}")
        monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(UserError, match=r"alone can write; set HOME to a folder of yours \(or STREAMRL_CACHE"):
        cache_directory()


def test_without_any_folder_the_remedy_is_told(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "gone"))
    with pytest.raises(UserError, match=r"temporary files .*; set HOME to a folder of yours \(or STREAMRL_CACHE"):
        cache_directory()


def test_what_is_missing_or_below_a_file_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / "file").touch(mode=0o600)
    assert is_own(tmp_path / "file")
    assert not is_own(tmp_path / "gone") and not is_own(tmp_path / "file" / "below")
