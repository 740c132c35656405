"""A program that a model wrote gets its reward for passing the tests, and does nothing else to anybody."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import psutil
import pytest

from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.config.tasks import Sandbox
from streamrl.launcher.site_setup import prepare
from streamrl.run_dir import layout
from streamrl.runtime.process_context import Addresses
from streamrl.runtime.process_plan import HIDDEN
from streamrl.tasks import sandbox as sandboxes
from streamrl.tasks.sandbox import MOST_PROCESSES, isolation_of, passes
from streamrl.tasks.sandbox_script import run_script
from streamrl.transport.curve import make_keys
from tests.tasks.bare_sandbox import BARE, NOTHING
from tests.waiting import scaled, wait_for

TESTS = "assert add(1, 2) == 3\nassert add('a', 'b') == 'ab'"
RIGHT = "def add(a, b): return a + b"
WRONG = "def add(a, b): return 0\n"
MINE = f"# of {os.getpid()}"
"""Comment that tells the sandboxes of this process's tests from those of tests that run beside them."""


def works(command: list[str]) -> bool:
    return subprocess.run([*command, "true"], stderr=subprocess.DEVNULL, check=False).returncode == 0


BUBBLEWRAP = shutil.which("bwrap")
HERE = [["namespaces"], ["namespaces", "bubblewrap"]][
    BUBBLEWRAP is not None and works([BUBBLEWRAP, *sandboxes._bubblewrap_options()])
]
"""The isolations that this machine has."""


@pytest.fixture(params=HERE)
def own(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """What streamrl isolates with by itself."""
    there = BUBBLEWRAP if request.param == "bubblewrap" else None
    monkeypatch.setattr(sandboxes.shutil, "which", lambda name: there)
    return Sandbox(seconds=scaled(5))


def left() -> list[psutil.Process]:
    """Processes of this process's sandboxes that live."""
    found = []
    for one in psutil.process_iter(["cmdline", "status"]):
        if one.info["status"] != psutil.STATUS_ZOMBIE and any(MINE in word for word in one.info["cmdline"] or []):
            found.append(one)
    return found


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sandboxes, "DRIVER", f"{sandboxes.DRIVER}\n{MINE}\n")
    yield
    wait_for(lambda: not left(), 20, what="every process of a sandbox to be gone")


CHEATS = {
    "ends before the tests": "import os; os._exit(0)",
    "prints the word of success that its driver knows": (
        "import __main__, os\nprint('\\n' + __main__.given['word'], flush=True)\nos._exit(0)"
    ),
    "says on every open file that it has passed": (
        "import os\nfor file in range(20):\n"
        "    try: os.write(file, b'[\"verdict\", true]\\n')\n    except OSError: pass\n"
    ),
    "replaces what checks": (
        "import builtins\nbuiltins.exec = lambda *a: None\nbuiltins.compile = lambda *a, **k: None\n"
        "builtins.AssertionError = type('Fine', (BaseException,), {})\n"
    ),
    "finds the expected answer in memory": (
        "import gc, sys\n"
        "def add(a, b):\n"
        "    frame, seen = sys._getframe(), []\n"
        "    while frame: seen += [*frame.f_globals.values(), *frame.f_locals.values()]; frame = frame.f_back\n"
        "    seen += gc.get_objects()\n"
        "    needle = chr(61) * 2 + ' ' + str(1 + 2)\n"
        "    texts = [one for one in seen if isinstance(one, str) and needle in one]\n"
        "    return a + b if texts else 0\n"
    ),
}


@pytest.mark.parametrize("cheat", CHEATS.values(), ids=CHEATS)
def test_nothing_that_a_program_does_in_its_own_process_passes_the_tests(cheat: str) -> None:
    program = cheat if "def add" in cheat else WRONG + cheat
    assert not passes(program, TESTS, NOTHING)


EQUAL = {
    "what is equal to everything": (
        "class Any:\n    __eq__ = lambda self, other: True\n    __hash__ = None\ndef add(a, b): return Any()\n"
    ),
    "a number that is equal to everything": (
        "class Any(int):\n    __eq__ = __ge__ = __le__ = lambda self, other: True\n    __hash__ = int.__hash__\n"
        "    __ne__ = lambda self, other: False\ndef add(a, b): return Any()\n"
    ),
    "a list that is equal to everything, and looks at what it is compared with": (
        "import sys\nclass Any(list):\n    __eq__ = lambda self, other: True\n    __hash__ = None\n"
        "    def __iter__(self): return iter([sys._getframe(1).f_locals])\ndef add(a, b): return Any()\n"
    ),
}


@pytest.mark.usefixtures("same_process")
@pytest.mark.parametrize("program", EQUAL.values(), ids=EQUAL)
def test_a_program_passes_by_nothing_that_it_returns(program: str) -> None:
    assert not passes(program, TESTS, NOTHING)


def test_a_program_that_is_right_passes_however_it_is_isolated(own: Sandbox) -> None:
    assert passes(RIGHT, TESTS, own)
    assert not passes(WRONG, TESTS, own)


LOOKS = """
import os, socket
def others(): return [one for one in os.listdir("/proc") if one.isdigit() and int(one) != os.getpid()]
def variables(): return sorted(os.environ.keys() - {"PATH", "HOME", "PWD", "LC_CTYPE"})
def connects(port):
    try: socket.create_connection(("127.0.0.1", port), 1)
    except OSError: return False
    return True
def interfaces(): return [name for _, name in socket.if_nameindex()]
"""


def test_a_program_sees_no_other_process_no_secret_and_no_network(
    own: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert passes(LOOKS, f"assert connects({port}) is True", NOTHING), "there is somebody to connect to"
        assert passes(LOOKS, f"assert connects({port}) is False", own)
    given = sorted(sandboxes.ONE_THREAD)
    assert passes(LOOKS, f"assert variables() == {given}\nassert set(interfaces()) <= {{'lo'}}", own)
    # bubblewrap's own first process is one
    assert passes(LOOKS, "assert len(others()) <= 1", own)


def test_bubblewrap_hides_the_users_files_and_namespaces_alone_say_that_they_do_not(
    tmp_path: Path, own: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    isolation = isolation_of(own)
    monkeypatch.setattr(
        sandboxes, "may_change_user", lambda _: False
    )  # who is root has more than this to hide files by
    (tmp_path / "secret").write_text("here")
    path = str(tmp_path / "secret")
    seen = f"assert seen() is {not isolation.command}"
    assert passes(f"import os\ndef seen(): return os.path.exists({path!r})", seen, own)
    assert ("can read" in isolation.weaker) is not bool(isolation.command)


PROBES = """
import os, socket
def opens(path):
    try: return bool(open(path).read())
    except OSError: return False
def lists(path):
    try: return bool(os.listdir(path))
    except OSError: return False
def connects(path):
    with socket.socket(socket.AF_UNIX) as one:
        try: one.connect(path)
        except OSError: return False
    return True
"""


def test_no_program_reaches_the_keys_and_the_sockets_of_the_run(
    tmp_path: Path, own: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Unix socket needs no network, and with the pair of the rewards process a program could give itself a reward."""
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")  # paths of sockets are short
    monkeypatch.setattr(sandboxes, "may_change_user", lambda _: False)  # another user has no rights to them anyway
    for site in ("here", "far"):
        make_keys(tmp_path / "links", site)
    site = {"trainer": {}, "generation": [{}]}
    values = {"hardware": "cpu", "sites": {"here": site}, "security": {"keys": str(tmp_path / "links")}}
    run_dir = tmp_path / "run, 10:30"
    run_dir.mkdir()
    with prepare(ClusterConfig.model_validate(values), RunConfig(), run_dir) as share:
        hub = urlparse(Addresses.load(share.run_dir).controller).path
        keys = run_dir / layout.KEYS / "inside-here"
        secrets = [keys / "rewards-here.key_secret", tmp_path / "links" / "here.key_secret"]
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(hub)
            listener.listen()
            shown = isolation_of(own).command == ()  # namespaces, in which other files can be seen
            public = tmp_path / "links" / "far.key"
            for given, seen in (("[]", shown), (share.env[HIDDEN], False)):
                monkeypatch.setenv(HIDDEN, given)
                tests = f"assert connects({hub!r}) is {seen}"
                tests += "".join(f"\nassert lists({str(path)!r}) is {seen}" for path in (keys, Path(hub).parent))
                tests += "".join(f"\nassert opens({str(path)!r}) is {seen}" for path in secrets)
                tests += f"\nassert opens({str(public)!r}) is {shown}"
                assert passes(PROBES, tests, own), given


ESCAPES = """
import os, time
for _ in range(2):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0: time.sleep(600)
        time.sleep(600)
"""


def test_what_a_program_has_started_ends_with_it(own: Sandbox) -> None:
    assert passes(ESCAPES + RIGHT, TESTS, own)  # the fixture looks for what is left


WORKER = f"""
from streamrl.config.tasks import Sandbox
from streamrl.tasks import sandbox
sandbox.DRIVER += "\\nCOMMENT\\n"
if NAMESPACES:
    sandbox.shutil.which = lambda name: None
sandbox.passes({ESCAPES + "while True: pass"!r}, "", Sandbox(seconds=300))
"""


def test_a_program_ends_with_its_worker_even_if_that_is_killed(own: Sandbox) -> None:
    script = WORKER.replace("NAMESPACES", str(not isolation_of(own).command)).replace("COMMENT", MINE)
    worker = subprocess.Popen([sys.executable, "-c", script])
    try:
        wait_for(lambda: len(left()) >= 6, 30, what="the program and all that it starts to be there")
    finally:
        worker.kill()
        worker.wait()


BOMB = "import os\nfor _ in range(9):\n    try: os.fork()\n    except OSError: pass\nwhile True: pass\n"
"""512 processes and no more: on a busy machine root's are counted late."""


def test_a_fork_bomb_is_ended_and_its_neighbours_go_on(own: Sandbox) -> None:
    assert not passes(BOMB, "", own.model_copy(update={"seconds": scaled(3.0)}))
    assert passes(RIGHT, TESTS, own)


FORKS = """
import os, time
def forks():
    for number in range(1000):
        try:
            if os.fork() == 0: time.sleep(600)
        except OSError:
            return number
    return 1000
"""


@pytest.fixture
def of_everybody(monkeypatch: pytest.MonkeyPatch, own: Sandbox) -> Iterator[None]:
    """Let sandboxes run the system's Python, where that of this environment is in a folder of root's own."""
    sandboxes.may_change_user.cache_clear()
    if os.geteuid() == 0 and not changes_user(own) and os.path.exists("/usr/bin/python3"):
        for name, path in {"executable": "/usr/bin/python3", "base_prefix": "/usr", "prefix": "/usr"}.items():
            monkeypatch.setattr(sandboxes.sys, name, path)
        sandboxes.may_change_user.cache_clear()
    yield
    sandboxes.may_change_user.cache_clear()


def changes_user(sandbox: Sandbox) -> bool:
    return sandboxes.may_change_user(isolation_of(sandbox).command)


@pytest.mark.usefixtures("of_everybody")
def test_the_kernel_refuses_a_program_more_processes_than_it_may_have(own: Sandbox) -> None:
    if os.geteuid() or changes_user(own):
        assert passes(FORKS, f"assert 1 <= forks() <= {MOST_PROCESSES}", own)
    else:  # they are counted
        assert not passes(FORKS, f"assert forks() > {MOST_PROCESSES}", own)


@pytest.mark.usefixtures("of_everybody")
def test_each_sandbox_of_root_is_another_user_who_reads_none_of_roots_files(tmp_path: Path, own: Sandbox) -> None:
    changes = changes_user(own)
    boxes = [sandboxes.Boxed("program", "", isolation_of(one), one) for one in (own, own, NOTHING)]
    assert [box.user is not None for box in boxes] == [changes, changes, False]
    assert not changes or boxes[0].user != boxes[1].user
    for box in boxes:
        box._close()
    if changes:
        secret = tmp_path / "secret"
        secret.write_text("here")
        secret.chmod(0o600)
        program = "import os\ndef user(): return os.getuid()\n" + PROBES
        seen = f"assert not opens({str(secret)!r})"
        assert passes(program, seen if isolation_of(own).command else f"{seen}\nassert user() >= 0x70000000", own)


@pytest.mark.usefixtures("of_everybody")
def test_a_script_opens_its_own_output_by_name_whoever_runs_it(own: Sandbox) -> None:
    assert run_script("echo 1 > /dev/stdout; echo 2 | tee /dev/stderr", "bash", own).text.splitlines() == [
        "1",
        "2",
        "2",
    ]


ANSWERS = {
    "a library of another Python": subprocess.CompletedProcess([], 0, sandboxes.BEGUN + b"/elsewhere\n"),
    "no namespaces": subprocess.CompletedProcess([], 1, b""),
    "waits": subprocess.TimeoutExpired([], 10),
    "no right to be others": PermissionError(1, "Operation not permitted"),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_root_stays_root_where_others_cannot_run_this_python_in_a_sandbox(
    monkeypatch: pytest.MonkeyPatch, answer: Exception | subprocess.CompletedProcess[bytes]
) -> None:
    right: list[Any] = [subprocess.CompletedProcess([], 0, sandboxes.BEGUN + f"{sys.base_prefix}\n".encode())]

    def run(*_: object, **__: object) -> subprocess.CompletedProcess[bytes]:
        if isinstance(right[0], Exception):
            raise right[0]
        found: subprocess.CompletedProcess[bytes] = right[0]
        return found

    def refused(*_: object) -> None:
        raise OSError(22, "Invalid argument")  # a number that the container's map does not have

    monkeypatch.setattr(sandboxes.os, "geteuid", lambda: 0)
    monkeypatch.setattr(sandboxes.os, "chown", lambda *_: None)
    monkeypatch.setattr(sandboxes.subprocess, "run", run)
    assert sandboxes.may_change_user.__wrapped__(())
    monkeypatch.setattr(sandboxes.os, "chown", refused)
    assert not sandboxes.may_change_user.__wrapped__(())
    monkeypatch.setattr(sandboxes.os, "chown", lambda *_: None)
    right[0] = answer
    assert not sandboxes.may_change_user.__wrapped__(())


@pytest.mark.skipif(os.geteuid() != 0, reason="the kernel limits the processes of others")
def test_too_many_processes_end_a_program_long_before_its_time_is_over() -> None:
    several = f"import subprocess\nall = [subprocess.Popen(['sleep', '600']) for _ in range({MOST_PROCESSES} + 2)]\n"
    assert not passes(several + "while True: pass", "", Sandbox(command=BARE, seconds=300))


def test_memory_files_and_descriptors_are_limited() -> None:
    small = Sandbox(command=BARE, seconds=20, memory_mb=256)
    assert not passes("x = bytearray(1 << 30)", "", small)
    assert not passes("open('large', 'wb').write(bytes(1 << 26))", "", NOTHING)
    assert not passes("files = [open('/dev/null') for _ in range(200)]", "", NOTHING)
    assert not passes("def add(a, b): return 'x' * (1 << 23)", TESTS, NOTHING)  # nor does an answer fill streamrl's


USES = {
    "exceptions": (
        "def root(x):\n    if x < 0: raise ValueError('negative')\n    return x ** 0.5",
        "try: root(-1)\nexcept ValueError as error: assert str(error) == 'negative'\nelse: assert False\n"
        "assert root(4) == 2",
    ),
    "objects": (
        "class Stack:\n    def __init__(self): self.all = []\n    def push(self, x): self.all.append(x)\n"
        "    def pop(self): return self.all.pop()\n    def __len__(self): return len(self.all)",
        "s = Stack()\ns.push(1); s.push((2, {3}))\nassert len(s) == 2 and s.pop() == (2, {3})\n"
        "assert s.all == [1] and s",
    ),
    "generators": (
        "def squares():\n    n = 0\n    while True: yield n * n; n += 1",
        "import itertools\nassert list(itertools.islice(squares(), 4)) == [0, 1, 4, 9]",
    ),
    "iterators": (
        "def numbers(text): return map(int, text)\ndef some():\n    yield 2\n    yield 1\n"
        "class Pair:\n    def __init__(self): self.all = [1, 2]\n    def __iter__(self): return iter(self.all)",
        "assert list(numbers('12')) == [1, 2] and tuple(some()) == (2, 1) and sorted(some()) == [1, 2]\n"
        "assert 1 in some() and 3 not in some() and list(Pair()) == [1, 2] and 2 in Pair() and some()",
    ),
    "what Python does without a method of the type": (
        "class Row:\n    def __getitem__(self, i): return [1, 2][i]\n    def __len__(self): return 2\n"
        "class All:\n    def __contains__(self, x): return 1\nclass Nothing: pass",
        "assert list(Row()) == [1, 2] and 2 in Row() and 3 not in Row() and 3 in All() and Nothing()\n"
        "for wrong in (len, iter, lambda one: 1 in one, lambda one: one[0]):\n"
        "    try: wrong(Nothing())\n    except TypeError: pass\n    else: assert False",
    ),
    "objects that extend what can be changed": (
        "from collections import OrderedDict\n"
        "class Cache(OrderedDict):\n    def get(self, key):\n        if key not in self: return -1\n"
        "        self.move_to_end(key)\n        return self[key]\n"
        "    def put(self, key, value):\n        self[key] = value\n"
        "        if len(self) > 2: self.popitem(last=False)\n"
        "class Stack(list):\n    def push(self, x): self.append(x)\n    def peek(self): return self[-1]",
        "c = Cache()\nc.put(1, 1); c.put(2, 2); assert c.get(1) == 1; c.put(3, 3)\n"
        "assert c.get(2) == -1 and c == {1: 1, 3: 3} and {1: 1} != c and list(c) == [1, 3]\n"
        "s = Stack()\nassert s == [] and not s\ns.push(1); s.append(2); s[0] = 5\n"
        "assert s.peek() == 2 and s == [5, 2] and [5, 2] == s and len(s) == 2 and s < [6] and s.pop() == 2\n"
        "assert s == [5] and s != [5, 2] and s == Stack([5]) and [s] == [[5]]",
    ),
    "plain values with attributes of their own": (
        "import enum\nfrom typing import NamedTuple\nclass Colour(enum.IntEnum):\n    RED = 1\n"
        "class Point(NamedTuple):\n    x: int\n    y: int\n"
        "class Metres(float):\n    @property\n    def unit(self): return 'm'\n"
        "def red(): return Colour.RED\ndef point(): return Point(1, 2)\ndef x_of(point): return point.x",
        "import copy\nassert red().name == 'RED' and red() == 1 and red() is Colour.RED and Colour['RED'] in Colour\n"
        "p = point()\nassert p == (1, 2) and p.y == 2 and p._asdict() == {'x': 1, 'y': 2} and x_of(p) == 1\n"
        "assert isinstance(p, tuple) and sum(p) == 3 and {p: 1}[(1, 2)] == 1 and copy.deepcopy(p) == p\n"
        "assert Metres(2).unit == 'm' and Metres(2) + 1 == 3 and not hasattr(Metres(2), 'seconds')",
    ),
    "functions of the tests": (
        "def each(f, xs): return [f(x) for x in xs]",
        "assert each(lambda x: x + 1, [1, 2]) == [2, 3]",
    ),
    "arguments that are changed in place": (
        "def order(xs): xs.sort()",
        "xs = [3, 1, 2]\nassert order(xs) is None and xs == [1, 2, 3]\nys = [2, 1]\norder(xs=ys)\nassert ys == [1, 2]",
    ),
    "checks in functions": (RIGHT, "def check(candidate):\n    assert candidate(1, 2) == 3\ncheck(add)"),
    "values of all plain types": (
        "import collections\ndef same(x): return x\ndef count(x): return collections.Counter(x)",
        "v = [None, True, 2 ** 9000, 1.5, float('inf'), 2j, 'ü', b'1', (1,), {2}, frozenset({3}), {(4,): [5]}]\n"
        "assert same(v) == v and [type(one) for one in same(v)] == [type(one) for one in v]\n"
        "assert count('aab') == {'a': 2, 'b': 1}",
    ),
    "a name of Python that the program has replaced stays Python's": (
        "def len(x): return 3\ndef two(): return 2",
        "assert len([1]) == 1 and two() == 2",
    ),
}


@pytest.mark.usefixtures("same_process")
@pytest.mark.parametrize(("program", "tests"), USES.values(), ids=USES)
def test_tests_use_the_programs_names_as_if_they_were_their_own(program: str, tests: str) -> None:
    assert passes(program, tests, NOTHING)


def test_names_are_used_as_well_from_one_process_to_another() -> None:
    kinds = ("objects that extend what can be changed", "arguments that are changed in place", "functions of the tests")
    programs, tests = zip(*(USES[kind] for kind in kinds), strict=True)
    assert passes("\n".join(programs), "\n".join(tests), NOTHING)


def test_without_bubblewrap_it_is_said_what_is_not_isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes.shutil, "which", lambda name: None)
    for changes, readers in ((False, "this user"), (True, "everybody")):
        monkeypatch.setattr(sandboxes, "may_change_user", lambda _, changes=changes: changes)
        assert f"they can read every file that {readers} can; install bubblewrap" in isolation_of(Sandbox()).weaker
    monkeypatch.setattr(sandboxes.shutil, "which", lambda name: "/usr/bin/bwrap")
    assert isolation_of(Sandbox()).command[0] == "/usr/bin/bwrap" and isolation_of(Sandbox()).weaker == ""
    assert isolation_of(NOTHING).command == tuple(BARE)
