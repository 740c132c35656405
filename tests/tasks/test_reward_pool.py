"""Reward workers: whatever one reward does makes one reward void, and no worker outlives the pool."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from streamrl.config.tasks import FileTask, ReasoningGymTask, Task
from streamrl.errors import RunFailed, UserError
from streamrl.rollouts.void import Void, VoidCause
from streamrl.runtime import output_pipe
from streamrl.tasks.procedural import ProceduralItems
from streamrl.tasks.reward_pool import RewardPool, RewardResult
from tests.marks import descendants
from tests.waiting import scaled, until, wait_for

TIMEOUT_S = scaled(0.7)
"""Limit of rewards that hang, and of no other: a loaded machine may take as long for those that do not."""
LATE = Void(VoidCause.TIMEOUT, f"timed out after {TIMEOUT_S:g} s")
NEVER_S = 240.0
"""Limit that no reward reaches."""
LOADED_S = 1.0
"""CPU time by which a worker has imported what it needs, and works."""
MISCHIEF = """
import ctypes, itertools, os, signal, sys, time
from streamrl.tasks.void_reward import VoidReward

BEFORE = "math_verify" in sys.modules

class JudgeFails(VoidReward):
    def __init__(self, status): self.status = status

class Unprintable(Exception):
    def __reduce__(self): raise TypeError("cannot be sent")
    def __str__(self): raise ValueError("no text")

def reward(completion, *, prompt, answer):
    match completion:
        case "hang": time.sleep(1000)
        case "hang and tell":
            open("hangs", "w").close()
            time.sleep(1000)
        case "hang deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True: pass
        case "hang in C": sum(itertools.repeat(0))  # no Python code runs in this process any more
        case "exit 3": os._exit(3)
        case "exit 0": os._exit(0)
        case "sys.exit": sys.exit(4)
        case "segfault":
            ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # no dump of its memory, which may take longer than the limit
            ctypes.string_at(0)
        case "raise": raise RuntimeError("first line\\nsecond")
        case "unprintable": raise Unprintable()
        case "deep": return reward_deep()
        case "own void": raise JudgeFails("judge is down")
        case "busy": raise VoidReward("provider", "429")
        case "busy in a group": raise ExceptionGroup("of tasks", [VoidReward("provider", "both", retry=False)])
        case _ if completion.startswith("once ") and not os.path.exists(completion):
            open(completion, "w").close()
            return reward(completion.removeprefix("once ") + " 3" * (completion == "once exit"), prompt="", answer=None)
        case "nan": return float("nan")
        case "text": return "1"
        case "noise":
            print("noise in Python", flush=True)
            os.system("echo noise from a child; echo to its stderr >&2")
        case "arrow": print("\N{RIGHTWARDS ARROW}")
        case "pid": return os.getpid()
        case "child returns" | "child raises" | "child leaves" | "child leaves with 3":
            if child := os.fork():  # whose exit code is the reward
                return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            match completion:
                case "child returns": return 0.5
                case "child raises": raise RuntimeError("in the child")
                case "child leaves": sys.exit()
                case _: sys.exit(3)
        case "before": return float(BEFORE)
        case "nap":
            time.sleep(0.2)
            return os.getpid()
    return 1.0

def reward_deep(): return reward_deep()
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    (tmp_path / "mischief.py").write_text(MISCHIEF)
    monkeypatch.chdir(tmp_path)
    return [FileTask(kind="file", name="mine", path="unused.jsonl", reward="mischief:reward")]


@contextlib.asynccontextmanager
async def started(pool: RewardPool) -> AsyncIterator[RewardPool]:
    try:
        await pool.start()
        yield pool
    finally:
        pool.close()


def ask(pool: RewardPool, completion: str) -> asyncio.Task[RewardResult]:
    return asyncio.ensure_future(pool.score("mine", completion, {"prompt": "p", "answer": None}))


def workers() -> list[psutil.Process]:
    """Worker processes of pools in this process (not what forks them, nor the resource tracker: both stay)."""
    found = []
    for child, words in descendants():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
            forked = child.ppid() != os.getpid() and "multiprocessing.forkserver" in " ".join(words)
            if alive(child) and (forked or "spawn_main" in " ".join(words)):
                found.append(child)
    return found


def alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def cpu_seconds(processes: list[psutil.Process]) -> dict[int, float]:
    """Used so far, by id, of those that live."""
    used = {}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            used[process.pid] = process.cpu_times().user
    return used


def stderr_of(process: psutil.Process) -> Path | None:
    """The file that a process writes its errors to; None: it has ended."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{process.pid}/fd/2").readlink()
    return None


def test_each_kind_of_failure_makes_one_reward_void_by_its_cause_and_the_others_get_theirs(
    tasks: list[Task], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_pipe, "MOST_LOGGED", 2**20)
    (tmp_path / "workers.log").write_text("older\n" * (2**20 // 6))
    expected = {
        "exit 3": Void(VoidCause.CRASH, "the reward's process died: exit code 3"),
        "exit 0": Void(VoidCause.CRASH, "the reward's process died: exit code 70"),
        "segfault": Void(VoidCause.CRASH, "the reward's process died: SIGSEGV"),
        "sys.exit": Void(VoidCause.VERIFIER, "SystemExit: 4"),
        "raise": Void(VoidCause.VERIFIER, "RuntimeError: first line second"),
        "unprintable": Void(VoidCause.VERIFIER, "Unprintable"),
        "deep": Void(VoidCause.VERIFIER, "RecursionError: maximum recursion depth exceeded"),
        "nan": Void(VoidCause.VERIFIER, "the reward must be finite, got nan"),
        "text": Void(VoidCause.VERIFIER, "the reward must be one number for one completion, got str '1'"),
        "own void": Void(VoidCause.VERIFIER, "judge is down"),
        "busy": Void(VoidCause.PROVIDER, "429"),
        "busy in a group": Void(VoidCause.PROVIDER, "both"),
        "noise": None,
    }

    async def run() -> list[RewardResult]:
        log_file = tmp_path / "workers.log"
        async with started(RewardPool(tasks, 0, workers=2, timeout_s=NEVER_S, log_file=log_file)) as pool:
            bad = {name: ask(pool, name) for name in expected}
            good = [ask(pool, "fine") for _ in range(30)]
            for name, void in expected.items():
                result = await bad[name]
                assert result.void == void, name
                assert result.reward == (1.0 if void is None else None)
                assert result.attempts == 1
            rewards = await asyncio.gather(*good)
            # one that starts has its parent's
            await until(lambda: [stderr_of(one) for one in workers()] == 2 * [log_file])
            return rewards

    assert [(result.reward, result.void) for result in asyncio.run(run())] == [(1.0, None)] * 30
    logged = (tmp_path / "workers.log").read_text()
    for text in ("noise in Python", "noise from a child", "to its stderr", "RuntimeError: first line"):
        assert text in logged
    # what a worker appends as the log is cut comes before it
    assert "[older output is removed]\nolder\n" in logged and len(logged) < 0.9 * 2**20
    assert capfd.readouterr() == ("", "")


def test_a_reward_that_hangs_is_void_when_its_time_is_over(tasks: list[Task]) -> None:
    async def run() -> list[RewardResult]:
        async with started(RewardPool(tasks, 0, workers=2, timeout_s=TIMEOUT_S)) as pool:
            return await asyncio.gather(ask(pool, "hang"), ask(pool, "hang in C"))

    for result in asyncio.run(run()):
        assert (result.reward, result.void, result.attempts) == (None, LATE, 1)
        assert result.seconds >= TIMEOUT_S


def test_a_reward_that_hangs_once_is_tried_again(tasks: list[Task]) -> None:
    async def run() -> RewardResult:
        async with started(RewardPool(tasks, 0, workers=1, timeout_s=TIMEOUT_S, attempts=9)) as pool:
            return await ask(pool, "once hang")

    result = asyncio.run(run())
    assert result.reward == 1.0 and result.attempts >= 2


def test_a_failed_reward_is_tried_again_unless_it_would_fail_in_the_same_way(tasks: list[Task]) -> None:
    async def run() -> dict[str, RewardResult]:
        async with started(RewardPool(tasks, 0, workers=1, timeout_s=NEVER_S, attempts=3)) as pool:
            names = ["once exit", "once raise", "once busy", "raise", "exit 3", "text", "nan"]
            return {name: await ask(pool, name) for name in names}

    found = asyncio.run(run())
    assert {name: (result.reward, result.attempts) for name, result in found.items()} == {
        "once exit": (1.0, 2),
        "once raise": (1.0, 2),
        "once busy": (1.0, 2),
        "raise": (None, 3),
        "exit 3": (None, 3),
        "text": (None, 1),
        "nan": (None, 1),
    }
    trace = found["raise"].traceback.splitlines()
    assert trace[0] == "Traceback (most recent call last):" and trace[-2:] == ["RuntimeError: first line", "second"]
    assert "mischief.py" in trace[1] and not any("streamrl" in line for line in trace)
    assert found["text"].traceback == ""  # nothing was raised: the text says it all


def test_a_log_that_cannot_be_written_costs_no_more_than_the_text(tasks: list[Task]) -> None:
    async def run() -> list[RewardResult]:
        async with started(RewardPool(tasks, 0, workers=1, timeout_s=NEVER_S, log_file=Path("/dev/full"))) as pool:
            return [await ask(pool, name) for name in ("raise", "fine")]

    raised, fine = asyncio.run(run())
    assert raised.void == Void(VoidCause.VERIFIER, "RuntimeError: first line second")
    assert (fine.reward, fine.void) == (1.0, None)


def test_whatever_else_fails_in_a_worker_makes_one_reward_void(
    tasks: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = RewardPool(tasks, 0, workers=1)

    async def fails(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pool, "_run", fails)
    result = asyncio.run(pool.score("mine", "fine", {}))
    assert result.void == Void(VoidCause.ENVIRONMENT, "OSError: [Errno 28] No space left on device")
    pool.close()
    with pytest.raises(OSError, match="No space left"):  # what a closed pool raises goes to who asked
        asyncio.run(pool.score("mine", "fine", {}))


def test_pauses_between_tries_are_doubled_up_to_a_limit(tasks: list[Task], monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    async def fails(*_: object, **__: object) -> None:
        raise OSError

    pool = RewardPool(tasks, 0, workers=1, attempts=1100, pause_s=1.5, longest_pause_s=5)
    monkeypatch.setattr(pool, "_run", fails)
    monkeypatch.setattr("streamrl.tasks.reward_pool.asyncio.sleep", pause)
    assert asyncio.run(pool.score("mine", "fine", {})).attempts == 1100
    assert pauses == [1.5, 3, *[5] * 1097]


def test_a_worker_that_dies_idle_is_replaced(tasks: list[Task]) -> None:
    async def run() -> None:
        async with started(RewardPool(tasks, 0, workers=1, timeout_s=NEVER_S)) as pool:
            for _ in range(2):
                pid = int((await ask(pool, "pid")).reward or 0)
                assert pid, "0 would end this process and its group"
                os.kill(pid, signal.SIGKILL)  # as the system does when memory runs out
                await until(lambda pid=pid: pid not in [one.pid for one in workers()])
                began_in = pool._pool
                assert began_in is not None
                await until(lambda one=began_in: workers() or not one.active)  # it has been noticed
            result = await ask(pool, "fine")
            assert (result.reward, result.void) == (1.0, None)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("does", "code"),
    [("child returns", 70), ("child raises", 1), ("child leaves", 0), ("child leaves with 3", 3)],
)
def test_a_process_that_a_reward_forks_ends_where_the_reward_ends(tasks: list[Task], does: str, code: int) -> None:
    async def run() -> None:
        async with started(RewardPool(tasks, 0, workers=1, timeout_s=NEVER_S)) as pool:
            before = descendants()
            for _ in range(2):
                result = await ask(pool, does)
                assert (result.reward, result.void) == (code, None)
            assert descendants() == before

    asyncio.run(run())


def test_a_replaced_worker_that_cannot_import_a_reward_tries_again_at_the_next_completion(
    tasks: list[Task], tmp_path: Path
) -> None:
    async def run() -> None:
        async with started(RewardPool(tasks, 0, workers=1, timeout_s=NEVER_S)) as pool:
            (tmp_path / "mischief.py").write_text("def reward(:")  # saved half-way
            await ask(pool, "exit 3")
            for _ in range(2):
                broken = await ask(pool, "fine")
                assert broken.void is not None and "cannot be imported: SyntaxError" in broken.void.text
            (tmp_path / "mischief.py").write_text(MISCHIEF)
            result = await ask(pool, "fine")
            assert (result.reward, result.void) == (1.0, None)

    asyncio.run(run())


def test_real_verifiers_score_in_workers(tmp_path: Path) -> None:
    tasks: list[Task] = [
        ReasoningGymTask(name="chain_sum", answer="last_number"),
        FileTask(kind="file", name="math", path="unused.jsonl"),
    ]
    items = ProceduralItems(tasks[0], 5)  # type: ignore[arg-type]

    async def run() -> None:
        async with started(RewardPool(tasks, 5, workers=1)) as pool:
            for index in (0, 1, 2000):
                right, given = items.entry(index)["answer"], items.reward_input(index)
                assert (await pool.score("chain_sum", f"It is {right}.", given)).reward == 1.0
            verified = await pool.score("math", "$\\frac{2}{4}$", {"prompt": "", "answer": "0.5"})
            assert (verified.reward, verified.void) == (1.0, None)
            unknown = await pool.score("typo", "1", {})
            assert (unknown.reward, unknown.void) == (None, Void(VoidCause.VERIFIER, "KeyError: 'typo'"))

    asyncio.run(run())


def test_time_waiting_for_a_worker_does_not_count(tasks: list[Task]) -> None:
    async def run() -> None:
        limit = scaled(1.5)
        async with started(RewardPool(tasks, 0, workers=1, timeout_s=limit)) as pool:
            hanging = ask(pool, "hang")
            last = await ask(pool, "fine")  # waits it out, and the restart of the worker
            assert (last.reward, last.void) == (1.0, None)
            assert last.seconds < limit
            void = (await hanging).void
            assert void is not None and void.cause == VoidCause.TIMEOUT

    asyncio.run(run())


def test_a_backlog_is_no_sign_of_a_broken_pool(tasks: list[Task], monkeypatch: pytest.MonkeyPatch) -> None:
    limit = scaled(1.0)
    monkeypatch.setattr("streamrl.tasks.reward_pool.RESTART_S", limit)

    async def run() -> list[RewardResult]:
        async with started(RewardPool(tasks, 0, workers=1, timeout_s=limit)) as pool:
            count = 3 + int(limit / 0.2)  # longer than both limits, although one takes a fifth of a second
            return await asyncio.gather(*[ask(pool, "nap") for _ in range(count)])

    for _ in range(5):  # where this machine stands still, one is late
        results = asyncio.run(run())
        if all(result.void is None or result.void.cause is not VoidCause.TIMEOUT for result in results):
            break
    assert len({(result.reward, result.void) for result in results}) == 1  # one worker, never restarted


def test_close_ends_hanging_workers_at_once_and_those_who_wait_are_told(tasks: list[Task]) -> None:
    async def run() -> None:
        pool = RewardPool(tasks, 0, workers=2, timeout_s=60)
        await pool.start()
        await until(lambda: len(workers()) == 2)
        idle = cpu_seconds(workers())
        waiting = [ask(pool, "hang in C") for _ in range(3)]
        await until(lambda: [one for one, used in cpu_seconds(workers()).items() if used > idle.get(one, 0) + 0.2][1:])
        began = time.monotonic()
        pool.close()
        assert time.monotonic() - began < scaled(10)
        assert not workers()
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, RuntimeError) and "closed" in str(result)
        with pytest.raises(RuntimeError, match="closed"):
            await ask(pool, "fine")
        pool.close()

    asyncio.run(run())


def test_a_cancelled_caller_frees_its_worker(tasks: list[Task]) -> None:
    async def run() -> None:
        async with started(RewardPool(tasks, 0, workers=1, timeout_s=60)) as pool:
            hanging = ask(pool, "hang and tell")
            await until(Path("hangs").exists)
            hanging.cancel()
            result = await asyncio.wait_for(ask(pool, "fine"), scaled(30))
            assert (result.reward, result.void) == (1.0, None)

    asyncio.run(run())


def test_a_wrong_reward_function_is_the_users_error_at_the_start(tasks: list[Task]) -> None:
    wrong: list[Task] = [FileTask(kind="file", name="mine", path="unused.jsonl", reward="mischief:rewrad")]
    with pytest.raises(UserError, match="has no attribute 'rewrad'"):
        asyncio.run(RewardPool(wrong, 0, workers=1).start())
    assert not workers()


@pytest.mark.parametrize(
    ("code", "limit_s", "says"),
    [("import os; os._exit(9)", NEVER_S, "did not start"), ("import time; time.sleep(99)", 1.0, "within 1 s")],
)
def test_a_module_that_dies_or_hangs_on_import_fails_the_start(
    tasks: list[Task], tmp_path: Path, code: str, limit_s: float, says: str
) -> None:
    (tmp_path / "bad_import.py").write_text(code)
    wrong: list[Task] = [FileTask(kind="file", name="mine", path="unused.jsonl", reward="bad_import:f")]
    with pytest.raises(RunFailed, match=says):
        asyncio.run(RewardPool(wrong, 0, workers=1).start(timeout_s=limit_s))
    assert not workers()


IN_ASCII = """
import asyncio
from streamrl.config.tasks import FileTask
from streamrl.tasks.reward_pool import RewardPool

async def main():
    task = FileTask(kind="file", name="mine", path="unused.jsonl", reward="mischief:reward")
    pool = RewardPool([task], 0, workers=1, timeout_s=60)
    await pool.start()
    print((await pool.score("mine", "arrow", {"prompt": "", "answer": None})).reward)
    pool.close()

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_reward_may_print_what_the_terminals_encoding_lacks(tasks: list[Task], tmp_path: Path) -> None:
    (tmp_path / "in_ascii.py").write_text(IN_ASCII)
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    env = os.environ | path | {"PYTHONIOENCODING": "ascii"}
    assert subprocess.check_output([sys.executable, "in_ascii.py"], text=True, env=env) == "1.0\n"


PARENT = """
import asyncio, sys
from streamrl.config.tasks import FileTask
from streamrl.tasks.reward_pool import RewardPool
from streamrl.tasks.reward_workers import METHOD

async def main():
    mine = FileTask(kind="file", name="mine", path="unused.jsonl", reward="mischief:reward")
    math = FileTask(kind="file", name="math", path="unused.jsonl", reward="math_verify")
    pool = RewardPool([mine, math], 0, workers=2, timeout_s=60)
    await pool.start()
    given = {"prompt": "", "answer": None}
    await pool.score("mine", "exit 3", given)  # one worker is a replacement, started from another thread
    before = await pool.score("mine", "before", given)
    assert before.reward == (METHOD == "forkserver"), before  # libraries were imported before what is the user's
    print("ready", flush=True)
    await asyncio.gather(*[pool.score("mine", "hang deaf", given) for _ in range(2)])

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_sigkill_of_the_parent_leaves_no_worker(tasks: list[Task], tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    parent = subprocess.Popen([sys.executable, "parent.py"], stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
        family = psutil.Process(parent.pid)
        idle = cpu_seconds(family.children(recursive=True))

        def busy() -> list[int]:
            now = cpu_seconds(family.children(recursive=True))
            return [pid for pid, used in now.items() if used > idle.get(pid, LOADED_S) + 0.2]

        wait_for(lambda: len(busy()) == 2, 60)  # both are in the endless loop, deaf to SIGTERM
        children = family.children(recursive=True)
    finally:
        parent.kill()
        parent.wait()
    _, left = psutil.wait_procs(children, timeout=scaled(20))
    assert not [child for child in left if alive(child)]
