"""What runs inside a sandbox: the program in one process, its tests in another, which the program cannot reach.

    program's process              streamrl (`sandbox.py`)      tests' process
    runs the model's code     <--  passes questions on     <--  runs the tests; a name of the program is a stand-in
    answers with plain values -->  passes answers on       -->  that asks; compares and decides

The program sees the arguments of each call and nothing else: not the tests, no expected value, no word that would count
as success. Values cross as JSON, never as pickles. What is no plain value stays with the program, and its stand-in is
equal to nothing but itself, so no `__eq__` of the program decides anything. An object of a class of the program's own
that extends a plain type is compared, in the tests' process, by what it is as one of that type:

    extends int, str, tuple, ...   that plain value; attributes that its type lacks are the program's (`Value`)
    extends list, dict, set        a stand-in, as the program may change what it holds (`Changeable`)

The text of `sandbox_values.py` and of this file is that of `python -I -c` (`sandbox.DRIVER`): they need the standard
library alone, and little of it, as two processes start for each reward. The first line of input is a JSON object:
`side` ('program', 'tests', or a script's language), `source`, `processes` (most that it may start), `parent` (a PID:
isolate yourself in namespaces, and end with that process; null: the sandbox's command does it), and `hidden` (files and
folders that are empty in those namespaces).
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import json
import operator
import os
import resource
import signal
import sys
import types

from streamrl.tasks.sandbox_values import CHANGEABLE, TAGS, decode, encode, encode_plain, plain_type, put_back

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, BinaryIO, NoReturn

NEW_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""CLONE_NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
PRIVATE = 0x44000  # MS_REC | MS_PRIVATE
BIND = 0x1000  # MS_BIND
CLOSED = 0x1 | 0x2 | 0x4 | 0x8  # MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
CAPABILITIES_V3 = 0x20080522
MOST_OPEN_FILES = 64
LOADER = """
def load(number):
    import linecache, os, sys
    def show(kind, error, trace):
        import traceback
        traceback.print_exception(kind, error, trace.tb_next.tb_next)  # without the loader
    with os.fdopen(number, encoding="utf-8", errors="surrogatepass") as file:
        file.seek(0)
        source = file.read()
    linecache.cache["<string>"] = len(source), None, [f"{{line}}\\n" for line in source.split("\\n")], "<string>"
    sys.excepthook = show
    del globals()["load"]
    exec(compile(source, "<string>", "exec"), globals())
load({})
"""
"""Runs a script from memory as `python -c` does: with a main file, `multiprocessing` would open that path again."""
SCRIPTS = {"python": [sys.executable, "-Iuc", LOADER], "bash": ["bash", "/proc/self/fd/{}"]}
"""Commands of scripts; {} stands for the number of the file."""


def contains(one: Any, value: Any) -> bool | None:
    """Return what an object's type says of whether it contains a value; None: it leaves that to the object's items."""
    return value in one if hasattr(type(one), "__contains__") else None


SPECIAL: dict[str, Callable[..., Any]] = {
    "bool": bool,
    "len": len,
    "iter": iter,
    "next": next,
    "item": operator.getitem,
    "set item": operator.setitem,
    "set attribute": setattr,
    "contains": contains,
    "str": str,
    "repr": repr,
}
"""What Python does by methods that it looks up in an object's type, and in ways of its own where there is none."""


class ProgramError(Exception):
    """Raised in the tests when the program raised something that is no exception of Python's own."""


class NotPlain(TypeError):
    """Raised in the tests when they pass to the program what it cannot be given."""


class Channel:
    """Lines of JSON to and from streamrl."""

    def __init__(self, read: BinaryIO) -> None:
        self._read, self._write = read, os.fdopen(os.dup(1), "wb")
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)  # the program neither reads nor prints where streamrl listens
        os.dup2(null, 1)

    def send(self, kind: str, value: Any = None) -> None:
        """Send one message."""
        self._write.write(json.dumps([kind, value]).encode() + b"\n")
        self._write.flush()

    def receive(self) -> tuple[str, Any]:
        """Wait for a message; raise EOFError if streamrl has ended."""
        if not (line := self._read.readline()):
            raise EOFError
        kind, value = json.loads(line)
        return kind, value


def failure(error: BaseException) -> list[str]:
    """Return an exception as its type's name and its text."""
    text = ""
    with contextlib.suppress(Exception):
        text = str(error)[:300]
    return [type(error).__name__, text]


class Program:
    """The side that runs the model's code, and answers questions about it."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.kept: list[Any] = []
        """Objects that the tests hold stand-ins of, by number."""
        self.numbers: dict[int, int] = {}
        """Their numbers, by id."""
        module = sys.modules["__main__"] = types.ModuleType("__main__")  # where unittest.main() and pickle look
        self.names = module.__dict__

    def run(self, source: str) -> None:
        """Run the program once the tests' process is there too, then answer until streamrl ends this process."""
        with contextlib.suppress(EOFError):
            self.channel.receive()
            if not self.ends_well(source):
                return
            self.channel.send("ready", [name for name in self.names if not name.startswith("__")])
            while True:
                kind, asked = self.channel.receive()
                if kind == "ask":
                    self.answer(asked)

    def ends_well(self, source: str) -> bool:
        """Run the program; tell streamrl if it fails."""
        try:
            exec(compile(source, "completion", "exec", dont_inherit=True), self.names)
        except BaseException as error:
            if isinstance(error, SystemExit) and error.code in (None, 0):  # as sys.exit(main()) ends one; False is 0
                return True
            self.channel.send("failed", failure(error))
            return False
        return True

    def answer(self, asked: list[Any]) -> None:
        """Answer one question."""
        try:
            what, target, name, *given = asked
            one = None if target is None else self.kept[target]
            args, named = self.value(given[0]), self.value(given[1])
            if what == "content":
                told = encode_plain(one, plain_type(one), self.keep)
            elif what == "name":
                told = self.told(self.names[name])
            elif what == "attribute":
                told = self.told(getattr(one, name))
            elif what == "call":
                told = self.told(one(*args, **named))  # type: ignore[misc]
            else:
                told = self.told(SPECIAL[name](one, *args))
            self.channel.send("answer", [told, self.told([*args, *named.values()])])
        except BaseException as error:  # SystemExit too
            self.channel.send("raised", failure(error))

    def told(self, value: Any) -> list[Any]:
        """Return a value as JSON; what is not plain is kept here."""
        return encode(value, self.keep)

    def keep(self, value: Any, kind: type | None) -> list[Any] | None:
        """Keep an object for the tests and describe it; None: it crosses as the plain value that it is."""
        if kind is not None and type(value).__module__ != "__main__":  # Counter, numpy.float64
            return None
        number = self.numbers.setdefault(id(value), len(self.kept))
        if number == len(self.kept):
            self.kept.append(value)
        if kind is None:
            return ["object", number]
        if kind in CHANGEABLE:
            return ["changeable", number]
        return ["value", [number, encode_plain(value, kind, self.keep)]]

    def value(self, told: Any) -> Any:
        """Return an argument: plain, an object kept here, or a function of the tests."""
        return decode(told, lambda what, number: self.kept[number] if what == "kept" else self.function(number))

    def function(self, number: int) -> Callable[..., Any]:
        """Return a function that calls one of the tests'."""

        def call(*args: Any) -> Any:
            self.channel.send("callback", [number, self.told(list(args))])
            while True:
                kind, value = self.channel.receive()
                if kind == "ask":  # the tests' function asks in turn
                    self.answer(value)
                elif kind == "returned":
                    return self.value(value)
                else:
                    raise raised(value)

        return call


def raised(told: Any) -> Exception:
    """Return the exception that `failure` described."""
    name, text = told
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(Exception):
            return kind(text)
    return ProgramError(f"{name}: {text}")


class Tests:
    """The side that runs the tests."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.functions: list[Callable[..., Any]] = []
        """Functions that the tests have passed to the program, by number."""
        self.stand_ins: dict[int, Any] = {}
        self.used = False
        """Whether the tests have looked for a name of the program, be it there or not."""
        self.not_plain: NotPlain | None = None
        """The newest error of that kind."""

    def run(self, source: str) -> None:
        """Run the tests once the program is ready, and tell the result, or why they judge no program."""
        kind, names = self.channel.receive()
        if kind != "ready":
            return
        raised = None
        try:
            exec(compile(source, "tests", "exec", dont_inherit=True), Names(self, frozenset(names)))
        except BaseException as error:
            raised = error
        passed = raised is None or (isinstance(raised, SystemExit) and raised.code in (None, 0))
        if not self.used:
            ended = ": ".join(failure(raised)).removesuffix(": ") if raised else "they ended without an error"
            self.channel.send("void", f"the tests never used the program, so they say nothing about it ({ended})")
        elif not passed and self.fail_by_themselves(raised):
            self.channel.send("void", str(self.not_plain))
        else:
            self.channel.send("verdict", passed)

    def fail_by_themselves(self, raised: BaseException | None) -> bool:
        """Whether tests that have failed would fail with every program, because of what they pass to it."""
        if isinstance(raised, SystemExit):  # a runner of tests, which tells of errors and ends
            return self.not_plain is not None
        while raised is not None and not isinstance(raised, NotPlain):
            raised = raised.__cause__ or raised.__context__
        return raised is not None

    def ask(self, what: str, target: int | None, name: str, args: list[Any], named: dict[str, Any]) -> Any:
        """Ask the program; return its answer, or raise what it has raised."""
        self.channel.send("ask", [what, target, name, self.told(args), self.told(named)])
        not_plain: NotPlain | None = None
        while True:
            kind, value = self.channel.receive()
            if kind == "answer":
                result, after = value
                for before, now in zip([*args, *named.values()], decode(after, self.stand_in), strict=False):
                    put_back(before, now)
                return decode(result, self.stand_in)
            if kind == "callback":
                not_plain = self.call_back(*value) or not_plain
            else:
                raise raised(value) from not_plain

    def call_back(self, number: int, told: Any) -> NotPlain | None:
        """Call one of the tests' functions for the program; return the error of one that returns no plain value."""
        try:
            result = self.functions[number](*decode(told, self.stand_in))
            self.channel.send("returned", self.told(result))
        except Exception as error:
            self.channel.send("raised", failure(error))
            return error if isinstance(error, NotPlain) else None
        return None

    def told(self, value: Any) -> list[Any]:
        """Return an argument as JSON."""
        return encode(value, self.describe)

    def describe(self, value: Any, kind: type | None) -> list[Any] | None:
        """Describe an argument that is not exactly of a plain type; None: it crosses as the plain value that it is."""
        if isinstance(value, OfProgram):
            return ["kept", object.__getattribute__(value, "_number")]
        if kind is not None:
            return None
        if not callable(value):
            kind_name = type(value).__name__
            text = f"the tests pass an object of the type {kind_name} to the program, and that is no plain value"
            self.not_plain = NotPlain(text)
            raise self.not_plain
        self.functions.append(value)
        return ["function", len(self.functions) - 1]

    def stand_in(self, what: str, told: Any) -> Any:
        """Return what stands for an object that the program keeps, always the same one."""
        number, plain = told if what == "value" else (told, None)
        if number not in self.stand_ins:
            if plain is not None:
                value = decode(plain, self.stand_in)
                one = VALUES[type(value)](value)
            else:
                one = Changeable() if what == "changeable" else StandIn()
            one.__dict__.update(_tests=self, _number=int(number))
            self.stand_ins[number] = one
        return self.stand_ins[number]


class Names(dict[str, object]):
    """The names of the tests: their own, those of Python, then those of the program."""

    def __init__(self, tests: Tests, of_program: frozenset[str]) -> None:
        super().__init__({"__name__": "__main__"})
        self._tests, self._of_program = tests, of_program

    def __missing__(self, name: str) -> Any:
        """Ask the program for one of its names, unless Python has it: `len` in a test is Python's."""
        if hasattr(builtins, name) or name.startswith("__"):
            raise KeyError(name)
        self._tests.used = True
        if name not in self._of_program:
            raise KeyError(name)
        return self._tests.ask("name", None, name, [], {})


class OfProgram:
    """Stands in the tests for an object that the program keeps, and has its attributes."""

    _tests: Tests
    _number: int

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._tests.ask("attribute", self._number, name, [], {})


class Value(OfProgram):
    """A plain value that has further attributes: a member of an `IntEnum`, a `namedtuple`."""

    def __deepcopy__(self, memo: Any) -> Value:
        return self


VALUES: dict[type, Any] = {
    kind: type(kind.__name__, (Value, kind), {}) for kind in TAGS if kind not in (type(None), bool, *CHANGEABLE)
}


class StandIn(OfProgram):
    """Stands in for what is no plain value."""

    def __setattr__(self, name: str, value: Any) -> None:
        self._special("set attribute", name, value)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._tests.ask("call", self._number, "", list(args), named)

    def _special(self, name: str, *args: Any) -> Any:
        return self._tests.ask("special", self._number, name, list(args), {})

    def __bool__(self) -> bool:
        return self._special("bool") is True

    def __len__(self) -> int:
        return int(self._special("len"))

    def __iter__(self) -> Iterator[Any]:
        return iter(found) if not isinstance(found := self._special("iter"), StandIn) else found

    def __next__(self) -> Any:
        return self._special("next")

    def __getitem__(self, key: Any) -> Any:
        return self._special("item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._special("set item", key, value)

    def __contains__(self, value: Any) -> bool:
        found = self._special("contains", value)
        return found is True if found is not None else any(one is value or one == value for one in self)

    def __str__(self) -> str:
        return str(self._special("str"))

    def __repr__(self) -> str:
        return str(self._special("repr"))


class Changeable(StandIn):
    """Stands in for an object of a class that extends list, dict or set; compared by what it holds now."""

    def _content(self) -> Any:
        return self._tests.ask("content", self._number, "", [], {})

    def __eq__(self, other: object) -> bool:
        return bool(self._content() == content_of(other))

    def __lt__(self, other: Any) -> bool:
        return bool(self._content() < content_of(other))

    def __le__(self, other: Any) -> bool:
        return bool(self._content() <= content_of(other))

    def __gt__(self, other: Any) -> bool:
        return bool(self._content() > content_of(other))

    def __ge__(self, other: Any) -> bool:
        return bool(self._content() >= content_of(other))

    __hash__ = None  # type: ignore[assignment]


def content_of(value: Any) -> Any:
    """Return what a value holds, if it is a `Changeable`."""
    return value._content() if isinstance(value, Changeable) else value


def isolate(parent: int, hidden: list[str]) -> None:
    """Enter namespaces without network and without other processes, and end with the parent and with the fork's parent.

    Args:
        parent: PID of the process that has started this one.
        hidden: files and folders in whose place something empty is seen, if they are there.

    Raises:
        OSError: the system does not let this user make namespaces.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    ids = os.getuid(), os.getgid()
    check(libc.unshare(NEW_NAMESPACES))
    maps = (f"{number} {number} 1" for number in ids)
    for name, text in zip(("setgroups", "uid_map", "gid_map"), ("deny", *maps), strict=True):
        with open(f"/proc/self/{name}", "w", encoding="utf-8") as file:
            file.write(text)
    check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))  # the kernel forgets it with other credentials
    if os.getppid() != parent:
        os._exit(1)
    if child := os.fork():
        for number in (0, 1):
            os.close(number)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(code if code >= 0 else 128 - code)
    check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))  # with its first process, the whole namespace ends
    check(libc.mount(None, b"/", None, PRIVATE, None))
    check(libc.mount(b"proc", b"/proc", b"proc", 0, None))  # others' memory is not to be found
    for path in hidden:  # a Unix socket can be connected to without a network
        if os.path.isdir(path):
            check(libc.mount(b"none", os.fsencode(path), b"tmpfs", CLOSED, b"size=4k,mode=0"))
        elif os.path.exists(path):
            check(libc.mount(os.fsencode(os.devnull), os.fsencode(path), None, BIND, None))
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    check(libc.capset((ctypes.c_uint32 * 2)(CAPABILITIES_V3, 0), (ctypes.c_uint32 * 6)()))


def tasks_of_user() -> int:
    """Count the threads of this user that can be seen, which RLIMIT_NPROC counts."""
    count = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def script_file(source: str) -> int:
    """Return the number of a file in memory with a script: as an argument it could have 128 KiB at most."""
    number = ctypes.CDLL(None).memfd_create(b"script", 0)  # `os` has this function in some builds of Python only
    with os.fdopen(number, "wb", closefd=False) as file:
        file.write(source.encode(errors="surrogatepass"))
    return number


def main() -> NoReturn:
    """Run one side."""
    read = os.fdopen(os.dup(0), "rb")  # the channel's too, as its buffer may hold what follows the first line
    given = json.loads(read.readline() or os._exit(1))
    try:
        if given["parent"] is not None:
            isolate(given["parent"], given["hidden"])
        resource.setrlimit(resource.RLIMIT_NPROC, (tasks_of_user() + given["processes"],) * 2)
        resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_OPEN_FILES, MOST_OPEN_FILES))
    except (OSError, ValueError) as error:
        sys.exit(f"cannot be isolated: {error}")
    if given["side"] in SCRIPTS:
        *words, last = SCRIPTS[given["side"]]
        command = [*words, last.format(script_file(given["source"]))]
        os.write(1, b'["begun", null]\n')
        os.dup2(1, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execvp(command[0], command)
    channel = Channel(read)
    channel.send("begun")
    (Program(channel) if given["side"] == "program" else Tests(channel)).run(given["source"])
    os._exit(0)


if __name__ == "__main__":
    main()
