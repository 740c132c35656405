"""What runs inside a sandbox: the program in one process, its tests in another, which the program cannot reach.

    program's process              streamrl (`sandbox.py`)      tests' process
    runs the model's code     <--  passes questions on     <--  runs the tests; a name of the program is a stand-in
    answers with plain values -->  passes answers on       -->  that asks; compares and decides

The program sees the arguments of each call and nothing else: not the tests, no expected value, no word that would count
as success. Values cross as JSON, never as pickles. What is no plain value stays with the program, and its stand-in is
equal to nothing but itself, so no `__eq__` of the program decides anything.

This file is the text of `python -I -c`: it needs the standard library alone. Its first line of input is a JSON object:
`side` ('program', 'tests', or a script's language), `source`, `processes` (most that it may start), `parent` (a PID:
isolate yourself in namespaces, and end with that process; null: the sandbox's command does it), and `hidden` (files and
folders that are empty in those namespaces).
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

NEW_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""CLONE_NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
PRIVATE = 0x44000  # MS_REC | MS_PRIVATE
BIND = 0x1000  # MS_BIND
CLOSED = 0x1 | 0x2 | 0x4 | 0x8  # MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
CAPABILITIES_V3 = 0x20080522
MOST_OPEN_FILES = 64
SCRIPTS = {"python": [sys.executable, "-Iuc"], "bash": ["bash", "-c"]}
PLAIN: dict[str, Any] = {"n": type(None), "b": bool, "i": int, "f": float, "c": complex, "s": str, "y": bytes}
MANY: dict[str, Any] = {"l": list, "t": tuple, "e": set, "z": frozenset}


class ProgramError(Exception):
    """Raised in the tests when the program raised something that is no exception of Python's own."""


class Channel:
    """Lines of JSON to and from streamrl."""

    def __init__(self) -> None:
        self._read, self._write = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
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


def encode(value: Any, other: Callable[[Any], Any]) -> list[Any]:
    """Return a value as JSON; of what is no plain value, `other` returns a description."""
    for tag, kind in PLAIN.items():
        if isinstance(value, kind):
            if tag == "i":
                return [tag, hex(value)]  # JSON's parser refuses long decimals
            if tag in "fc":
                return [tag, repr(kind(value))]  # infinity and NaN too
            return [tag, value.hex() if isinstance(value, bytes) else value]
    for tag, kind in MANY.items():
        if isinstance(value, kind):
            return [tag, [encode(one, other) for one in value]]
    if isinstance(value, dict):
        return ["d", [[encode(key, other), encode(one, other)] for key, one in dict.items(value)]]
    return ["o", other(value)]


def decode(told: Any, other: Callable[[Any], Any]) -> Any:
    """Return the value that `encode` described."""
    tag, value = told
    if tag == "i":
        return int(value, 16)
    if tag == "y":
        return bytes.fromhex(value)
    if tag in PLAIN:
        return value if tag in "nbs" else PLAIN[tag](value)
    if tag in MANY:
        return MANY[tag](decode(one, other) for one in value)
    if tag == "d":
        return {decode(key, other): decode(one, other) for key, one in value}
    return other(value)


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
        self.names: dict[str, Any] = {"__name__": "__main__"}

    def run(self, source: str) -> None:
        """Run the program, then answer until streamrl ends this process."""
        try:
            exec(compile(source, "completion", "exec", dont_inherit=True), self.names)
        except BaseException as error:
            self.channel.send("failed", failure(error))
            return
        self.channel.send("ready", [name for name in self.names if not name.startswith("__")])
        with contextlib.suppress(EOFError):
            while True:
                kind, asked = self.channel.receive()
                if kind == "ask":
                    self.answer(asked)

    def answer(self, asked: list[Any]) -> None:
        """Answer one question."""
        try:
            what, target, name, *given = asked
            args: list[Any] = []
            if what == "name":
                result = self.names[name]
            elif what == "attribute":
                result = getattr(self.kept[target], name)
            else:
                args, named = self.value(given[0]), self.value(given[1])
                if what == "call":
                    result = self.kept[target](*args, **named)
                else:  # 'special': a method that Python looks up in the type
                    result = getattr(type(self.kept[target]), name)(self.kept[target], *args)
            self.channel.send("answer", [self.told(result), self.told(list(args))])
        except BaseException as error:  # SystemExit too
            self.channel.send("raised", failure(error))

    def told(self, value: Any) -> list[Any]:
        """Return a value as JSON; what is not plain is kept here."""
        return encode(value, self.keep)

    def keep(self, value: Any) -> int:
        """Keep an object for the tests; return its number."""
        for number, one in enumerate(self.kept):
            if one is value:
                return number
        self.kept.append(value)
        return len(self.kept) - 1

    def value(self, told: Any) -> Any:
        """Return an argument: plain, an object kept here, or a function of the tests."""
        return decode(told, lambda what: self.kept[what["kept"]] if "kept" in what else self.function(what["function"]))

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
        self.stand_ins: dict[int, StandIn] = {}
        self.used = False
        """Whether the tests have looked for a name of the program, be it there or not."""

    def run(self, source: str) -> None:
        """Run the tests once the program is ready, and tell the result, or that they never used the program."""
        kind, names = self.channel.receive()
        if kind != "ready":
            return
        raised = None
        try:
            exec(compile(source, "tests", "exec", dont_inherit=True), Names(self, frozenset(names)))
        except BaseException as error:
            raised = error
        if not self.used:
            self.channel.send("unused", failure(raised) if raised else None)
            return
        self.channel.send("verdict", raised is None or (isinstance(raised, SystemExit) and raised.code in (None, 0)))

    def ask(self, what: str, target: int | None, name: str, args: list[Any], named: dict[str, Any]) -> Any:
        """Ask the program; return its answer, or raise what it has raised."""
        self.channel.send("ask", [what, target, name, self.told(args), self.told(named)])
        while True:
            kind, value = self.channel.receive()
            if kind == "answer":
                result, after = value
                for before, now in zip(args, decode(after, self.stand_in), strict=False):
                    put_back(before, now)
                return decode(result, self.stand_in)
            if kind == "callback":
                self.call_back(*value)
            else:
                raise raised(value)

    def call_back(self, number: int, told: Any) -> None:
        """Call one of the tests' functions for the program."""
        try:
            result = self.functions[number](*decode(told, self.stand_in))
            self.channel.send("returned", self.told(result))
        except Exception as error:
            self.channel.send("raised", failure(error))

    def told(self, value: Any) -> list[Any]:
        """Return an argument as JSON."""
        return encode(value, self.describe)

    def describe(self, value: Any) -> dict[str, int]:
        """Describe an argument that is no plain value."""
        if isinstance(value, StandIn):
            return {"kept": object.__getattribute__(value, "_number")}
        if not callable(value):
            raise TypeError(f"the tests pass {value!r} to the program, which is no plain value")
        self.functions.append(value)
        return {"function": len(self.functions) - 1}

    def stand_in(self, number: int) -> StandIn:
        """Return the stand-in of an object that the program keeps, always the same one."""
        return self.stand_ins.setdefault(int(number), StandIn(self, int(number)))


def put_back(before: Any, now: Any) -> None:
    """Let an argument have the contents that the program has given it."""
    if before is now or type(before) is not type(now):
        return
    if isinstance(before, list):
        before[:] = now
    elif isinstance(before, dict | set):
        before.clear()
        before.update(now)


class Names(dict[str, Any]):
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


class StandIn:
    """Stands in the tests for an object of the program."""

    def __init__(self, tests: Tests, number: int) -> None:
        self.__dict__.update(_tests=tests, _number=number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._tests.ask("attribute", self._number, name, [], {})

    def __setattr__(self, name: str, value: Any) -> None:
        self._special("__setattr__", name, value)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._tests.ask("call", self._number, "", list(args), named)

    def _special(self, name: str, *args: Any) -> Any:
        return self._tests.ask("special", self._number, name, list(args), {})

    def __bool__(self) -> bool:
        try:
            return self._special("__bool__") is True
        except AttributeError:
            with contextlib.suppress(AttributeError):
                return len(self) > 0
            return True

    def __len__(self) -> int:
        return int(self._special("__len__"))

    def __iter__(self) -> Iterator[Any]:
        return iter(found) if not isinstance(found := self._special("__iter__"), StandIn) else found

    def __next__(self) -> Any:
        return self._special("__next__")

    def __getitem__(self, key: Any) -> Any:
        return self._special("__getitem__", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._special("__setitem__", key, value)

    def __contains__(self, value: Any) -> bool:
        return self._special("__contains__", value) is True

    def __str__(self) -> str:
        return str(self._special("__str__"))

    def __repr__(self) -> str:
        return str(self._special("__repr__"))


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
    Path("/proc/self/setgroups").write_text("deny")
    for name, number in zip(("uid_map", "gid_map"), ids, strict=True):
        Path(f"/proc/self/{name}").write_text(f"{number} {number} 1")
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
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            count += len(os.listdir(folder / "task")) * (folder.stat().st_uid == os.getuid())
    return count


def main() -> NoReturn:
    """Run one side."""
    line = b""
    while not line.endswith(b"\n"):  # unbuffered: what follows is the channel's
        line += os.read(0, 1) or os._exit(1)
    given = json.loads(line)
    try:
        if given["parent"] is not None:
            isolate(given["parent"], given["hidden"])
        resource.setrlimit(resource.RLIMIT_NPROC, (tasks_of_user() + given["processes"],) * 2)
        resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_OPEN_FILES, MOST_OPEN_FILES))
    except (OSError, ValueError) as error:
        sys.exit(f"cannot be isolated: {error}")
    if given["side"] in SCRIPTS:
        os.write(1, b'["begun", null]\n')
        os.dup2(1, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execvp((command := SCRIPTS[given["side"]])[0], [*command, given["source"]])
    channel = Channel()
    channel.send("begun")
    (Program(channel) if given["side"] == "program" else Tests(channel)).run(given["source"])
    os._exit(0)


if __name__ == "__main__":
    main()
