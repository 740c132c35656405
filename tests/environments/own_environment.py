"""An environment for tests, installed into a venv without any package."""

from __future__ import annotations

from pathlib import Path

from streamrl.environments.installed import InstalledEnvironment, add_environment

CODE = """
import os, socket, subprocess, sys, time

FORKED, KEPT = [], []

class Room:
    def __init__(self, config):
        if config.get("wants") == "a display":
            raise RuntimeError("X11: The DISPLAY environment variable is missing")
        if config.get("port"):
            listening = socket.socket()
            KEPT.append(listening)
            listening.bind(("127.0.0.1", config["port"]))
            listening.listen()
        if config.get("wants") == "a silence":
            time.sleep(3600)
        if config.get("wants") == "an end":
            os._exit(7)
        if "child" in config and not FORKED:
            FORKED.append(True)
            if child := os.fork():
                KEPT.append(os.WEXITSTATUS(os.waitpid(child, 0)[1]))
            elif config["child"] == "raises":
                raise ValueError("of the child")
        print("a room is made")
        self.draws, self.mark = config.get("draws"), None

    def reset(self, item):
        self.kind, self.left = item["prompt"], item.get("steps", 2)
        self.mark, title = item.get("mark"), item.get("title", "a room")
        self.pays, self.numbers = item.get("pays", 0.5), item.get("numbers")
        if self.kind == "forked":
            return str(KEPT)
        if self.kind == "raises at once":
            raise KeyError("no such room")
        if self.kind == "never resets":
            time.sleep(3600)
        if self.kind == "dies beside a child":
            child = os.fork()
            if child == 0:
                time.sleep(3600)
                os._exit(0)
            with open(item["path"], "w") as file:
                file.write(str(child))
            os._exit(9)
        if self.kind == "dies beside a daemon":
            daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
            with open(item["path"], "w") as file:
                file.write(str(daemon.pid))
            os._exit(9)
        if self.kind == "resets to a number":
            return 7
        if self.kind == "variables":
            return ",".join(os.environ.get(name, "none") for name in ("NO_PROXY", "no_proxy"))
        if self.draws:
            return str(time.time_ns())
        return [{"role": "system", "content": f"{title} of {os.getpid()}"}, {"role": "user", "content": self.kind}]

    def step(self, text):
        self.left -= 1
        if self.kind == "leaks" or text == "leak":
            KEPT.append(bytearray(os.urandom(2**20)) * 40)
        wrong = {"an int": 5, "a text": ("t", "1", True), "nan": ("t", float("nan"), True), "no bool": ("t", 1, "no"),
                 "no metric": ("t", 1, True, {"a": "b"}), "no message": (["t"], 1, True),
                 "bytes": ([{"role": "user", "content": b"b"}], 1.0, False)}
        if self.kind in wrong:
            return wrong[self.kind]
        if self.kind == "dies" or text == "die":
            os._exit(9)
        if self.kind == "stuck" or text == "stick":
            time.sleep(3600)
        if self.kind.startswith("forks, and the child"):
            child = os.fork()
            if child == 0 and self.kind.endswith("raises"):
                raise ValueError("of the child")
            if child == 0 and self.kind.endswith("leaves"):
                sys.exit(3)
            if child == 0:
                return "of the child", -7.0, True
            return "of the parent", os.WEXITSTATUS(os.waitpid(child, 0)[1]), True
        numbers = {"words": len(text.split())} if self.numbers is None else self.numbers
        return f"you said {text}", self.pays, self.left <= 0, numbers

    def close(self):
        if self.mark:
            open(self.mark, "w").close()
            raise RuntimeError("it is broken")

    def random_answer(self, draw):
        return str(draw.randint(1, 6))

def make(config):
    return Room(config)

def not_one(config):
    return object()
"""


def install(folder: Path, make: str = "own_room:make", name: str = "room") -> InstalledEnvironment:
    """Install the environment below a folder; its code lies there as well."""
    (folder / "own_room.py").write_text(CODE)
    return add_environment(folder / "environments" / name, make, paths=[folder])
