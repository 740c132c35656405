"""docs/how-to/troubleshoot.md: every message in it is provoked, and is what is printed.

A message is the block below a `<!-- message: NAME -->`; `PROVOKED[NAME]` returns what was printed. `<...>`
stands for any text of one line (`<... lines>`: of several), the same one wherever it comes again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import AsyncMock, Mock, create_autospec

import numpy as np
import pytest

from streamrl.config.load import load_cluster, load_run
from streamrl.config.run import RunConfig
from streamrl.config.tasks import FileTask
from streamrl.controller.group_source import GroupSource
from streamrl.controller.mismatch_guard import MismatchGuard
from streamrl.controller.refused_steps import RefusedSteps
from streamrl.controller.void_watch import VoidWatch
from streamrl.controller.weight_canary import Measured, WeightCanary
from streamrl.errors import SEE_DOCS, ErrorCode, RunFailed, writing
from streamrl.generation.site.dispatcher import Dispatcher
from streamrl.generation.site.fleet import SiteFleet
from streamrl.generation.site.instance_life import InstanceLife, Life
from streamrl.generation.site.token_journal import TokenJournal
from streamrl.launcher import supervisor
from streamrl.launcher.resume_check import check_checkpoint
from streamrl.machine import installed_packages
from streamrl.protocol.controller_trainer import Refusal
from streamrl.report.live_view import PlainLines
from streamrl.report.panels import step_line
from streamrl.rollouts.kept_micro_batches import KeptMicroBatches
from streamrl.rollouts.ledger import KnownSteps, Ledger
from streamrl.rollouts.void import Void, VoidCause
from streamrl.run_dir import layout
from streamrl.run_dir.checkpoints import CheckpointFolder, unfitting, unreadable
from streamrl.run_dir.instance_files import StartedProcess, write_started
from streamrl.run_dir.resume_point import resume_point
from streamrl.run_dir.status import RunStatus, write_status
from streamrl.runtime.process_context import Addresses, RoleContext
from streamrl.runtime.site_connections import connect_home, home_hub, to_home
from streamrl.tasks.reward_pool import RewardPool
from streamrl.tasks.source import PromptSource
from streamrl.training.checkpoint_writing import told_in_words
from streamrl.transport.curve import ClientSecurity
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Hub, Link
from tests.cli.calling import streamrl
from tests.controller.test_refused_steps import sent_batch
from tests.ports import free_port
from tests.report.synthetic import INSTANCES, make_row, make_status
from tests.troubled_place import LIMIT_S, SLEEP, Place
from tests.waiting import scaled

DOC = Path(__file__).parents[1] / "docs" / "how-to" / "troubleshoot.md"
KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
EXPIRES = """
import asyncio, sys
from streamrl.launcher import entry_point
from streamrl.transport.deadlines import WaitRegistry

async def wait():
    async with WaitRegistry("controller").deadline("weights 6 to reach service-here", 0.6):
        await asyncio.Event().wait()

entry_point._role = lambda args: wait()
sys.argv[1:] = ["controller", "--run-dir", "runs/tiny"]
sys.exit(entry_point.main())
"""
FAILS = """
import sys
from streamrl.launcher import entry_point

class EngineDeadError(Exception):
    pass

async def generate():
    raise EngineDeadError("EngineCore encountered an issue.")

entry_point._role = lambda args: generate()
sys.argv[1:] = ["instance", "--run-dir", ".", "--name", "here-one-0"]
sys.exit(entry_point.main())
"""
REWARDS = """
import os, time

def reward(completion, *, prompt, answer):
    match completion:
        case "hang": time.sleep(1000)
        case "raise": raise ValueError("not a number: 'x'")
        case "die": os.abort()
    return 1.0
"""

Provoke = Callable[["Place"], str]
PROVOKED: dict[str, Provoke] = {
    "unknown-key": lambda place: place.write_run(batch={"prompt_per_step": 4}).launch(),
    "wrong-value": lambda place: place.launch("--set", "steps=many"),
    "no-such-model": lambda place: place.launch("--set", "model.path=modle"),
    "no-model-folder": lambda place: place.launch("--set", "model.path=."),
    "too-few-gpus": lambda place: place.write_cluster(hardware="cuda", trainer={"ranks": 1000}).launch(),
    "unknown-gpu": lambda place: place.write_cluster(generation=[{"gpu": "H1000"}]).say(
        "plan", "--cluster", "cluster.yaml", "--model", "7b", "--lengths", "2k"
    ),
    "no-room-for-prompts": lambda place: place.write_run(sampling={"max_tokens": 64}).launch(),
    "memory-warning": lambda place: place.write_cluster(generation=[{"kv_cache_gb": 1e6}]).launch(code=0),
    "context-too-long": lambda place: place.launch("--set", "model.max_context=1024"),
    "disk-too-small": lambda place: place.launch(
        "--set", f"checkpoint={{every: 1, keep: {10**9}}}", "--set", f"steps={2 * 10**9}"
    ),
    "reward-not-found": lambda place: place.launch("--set", "tasks.0.reward=no_such_module:score"),
    "resume-with-changes": lambda place: (
        place.save_run() and place.say("launch", "--resume", "runs/tiny", "--set", "seed=2")
    ),
    "no-run": lambda place: place.say("launch", "--resume", "runs"),
    "key-missing": lambda place: place.write_two_sites(keys=("here",)).launch("--site", "west"),
    "public-key-missing": lambda place: place.write_two_sites(keys=("west",)).launch("--site", "west"),
    "reward-timeout": lambda place: scored(place, "hang"),
    "reward-raised": lambda place: scored(place, "raise"),
    "reward-died": lambda place: scored(place, "die"),
    "rewards-void": lambda place: step_line(make_row(3), None, 20, None),
    "last-words": lambda place: place.supervise({"controller": EXPIRES}),
    "killed": lambda place: place.supervise({"trainer": KILLED}, recovery={"restarts": 1, "pause_s": 0}),
    "given-up": lambda place: place.supervise({"trainer": KILLED}, recovery={"restarts": 1, "pause_s": 0}),
    "killed-for-good": lambda place: place.supervise({"trainer": KILLED}),
}


def provokes(function: Provoke) -> Provoke:
    """For the message with the function's name."""
    name = function.__name__.replace("_", "-")
    assert PROVOKED.setdefault(name, function) is function
    return function


def messages() -> dict[str, str]:
    found = re.findall(r"<!-- message: ([\w-]+) -->\n```text\n(.*?)\n```\n", DOC.read_text(), flags=re.DOTALL)
    assert len(dict(found)) == len(found), "two messages have the same name"
    return dict(found)


def pattern(message: str) -> re.Pattern[str]:
    """What a message of the file stands for."""
    parts, seen = [], dict[str, str]()
    for number, part in enumerate(re.split(r"<([^<>\n]+)>", message)):
        if number % 2 == 0:
            parts.append(re.escape(part))
        elif part in seen:
            parts.append(f"(?P={seen[part]})")
        else:
            seen[part] = f"p{number}"
            wild = r"(?:.|\n)+?" if part.endswith(" lines") else ".+?"
            parts.append(f"(?P<p{number}>{wild})")
    return re.compile("".join(parts))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Place:
    return Place(tmp_path, monkeypatch, capfd)


def last_words(work: Callable[[], object]) -> str:
    """What a process of a run says at its end, when it does this."""
    with pytest.raises(RunFailed) as failure:
        work()
    return str(failure.value)


# -- bad input


@provokes
def model_not_fetched(place: Place) -> str:
    place.monkeypatch.setenv("STREAMRL_CACHE", str(place.folder / "empty"))
    return place.launch("--set", "model.path=smollm2-135m")


@provokes
def not_installed(place: Place) -> str:
    place.monkeypatch.setattr(installed_packages.importlib.util, "find_spec", lambda name: None)
    return place.launch()


@provokes
def no_cpu_build(place: Place) -> str:
    versions = {"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu", "torchaudio": "2.11.0"}
    place.monkeypatch.setattr(installed_packages, "_version", lambda name: versions.get(name, ""))
    said = place.launch()
    assert "torchvision 0" not in said
    return said


@provokes
def packing_wrong(place: Place) -> str:
    from transformers import Qwen3NextConfig

    Qwen3NextConfig(num_hidden_layers=4).save_pretrained(place.folder / "model")
    return place.write_run(batch={"packing": "shared"}).launch()


@provokes
def port_in_use(place: Place) -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return place.write_cluster(port=taken.getsockname()[1]).launch()


@provokes
def already_done(place: Place) -> str:
    (place.save_run() / "checkpoints" / "step_4").mkdir(parents=True)
    return place.resume()


@provokes
def in_use(place: Place) -> str:
    place.write_two_sites(keys=("here", "west"))
    (port,) = [site.port for site in load_cluster("cluster.yaml").sites.values() if site.port]
    with supervisor._locked(place.save_run()), socket.create_server(("127.0.0.1", port)):  # of the run that lives
        return place.resume("--site", "here", "--dry-run")


@provokes
def generating_site(place: Place) -> str:
    return place.write_two_sites().resume("--site", "west", "--dry-run")


@provokes
def generating_folder(place: Place) -> str:
    Addresses("", "", {"west": ""}).save(place.write_two_sites().save_run())
    return place.resume("--site", "here", "--dry-run")


@provokes
def key_open(place: Place) -> str:
    place.write_two_sites(keys=("here", "west"))
    (place.folder / "keys" / "west.key_secret").chmod(0o644)
    return place.launch("--site", "west")


# -- what processes of a run say at their end


@provokes
def all_prompts_too_long(place: Place) -> str:
    (place.folder / "prompts.jsonl").write_text(json.dumps({"prompt": "1+" * 40, "answer": "2"}))
    run = load_run("run.yaml")
    letters = SimpleNamespace(chat_template=None, encode=lambda text: [ord(letter) for letter in text])
    return last_words(lambda: GroupSource(run, PromptSource(run.tasks, run.seed), letters).next_group(1))


@provokes
def disk_full(place: Place) -> str:
    ledger = Ledger(place.folder / "ledger.sqlite")
    ledger._db.execute("PRAGMA max_page_count=1")  # sqlite then does as it does on a full disk
    return last_words(lambda: [ledger.issue([(f"{n}.{m}" * 100, f"{n}", b"") for m in range(100)]) for n in range(100)])


@provokes
def file_not_written(place: Place) -> str:
    with pytest.raises(RunFailed) as found, writing(place.folder / "runs" / "tiny" / "metrics.jsonl"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return str(found.value)


@provokes
def words_not_written(place: Place) -> str:
    def full(**options: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    ended = place.process("here-one-0", "raise SystemExit(74)")
    place.monkeypatch.setattr(tempfile, "TemporaryFile", full)
    return ended.short_words()


@provokes
def checkpoint_not_written(place: Place) -> str:
    with pytest.raises(RunFailed) as found, told_in_words(place.folder / "runs" / "tiny" / "checkpoints" / "step_1"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return str(found.value)


@provokes
def checkpoint_unreadable(place: Place) -> str:
    return str(unreadable(place.folder / "runs" / "tiny" / "checkpoints" / "step_1", EOFError("Ran out of input")))


@provokes
def checkpoint_missing(place: Place) -> str:
    return last_words(lambda: CheckpointFolder(place.folder / "checkpoints").to_resume(8))


@provokes
def steps_unknown(place: Place) -> str:
    (rollouts := place.folder / layout.ROLLOUTS).mkdir()
    (rollouts / "step_000008.parquet").touch()
    return last_words(lambda: resume_point(place.folder, KnownSteps(), 2))


@provokes
def ledger_unfitting(place: Place) -> str:
    ledger = Ledger(place.folder / "ledger.sqlite")
    return last_words(lambda: [ledger.issue([("00000012.000", "00000012", b"")]) for _ in range(2)])


@provokes
def checkpoint_unfitting(place: Place) -> str:
    error = RuntimeError("Missing key in checkpoint state_dict: model.lm_head.bias.")
    return str(unfitting(place.folder / "runs" / "tiny" / "checkpoints" / "step_1", error))


@provokes
def checkpoint_without_critic(place: Place) -> str:
    run_dir = place.folder / "runs" / "tiny"
    state = run_dir / layout.CHECKPOINTS / "step_1" / "trainer_state"
    state.mkdir(parents=True)
    (state / ".metadata").write_bytes(b"model.lm_head.weight")
    run = RunConfig.model_validate({"algorithm": {"name": "ppo", "critic": {}}})
    return "error: " + next(iter(check_checkpoint(run, run_dir)))


@provokes
def deadline(place: Place) -> str:
    async def wait() -> None:
        async with WaitRegistry("controller").deadline("weights 6 to reach service-here", 0.05):
            await asyncio.Event().wait()

    return last_words(lambda: asyncio.run(wait()))


@provokes
def no_instance_left(place: Place) -> str:
    files, addresses = (load_cluster("cluster.yaml"), load_run("run.yaml")), Addresses("", "", {})
    context = RoleContext("service-here", "here", place.folder, *files, addresses, False)

    async def watch() -> None:
        waits, dispatcher, told = WaitRegistry("service-here"), create_autospec(Dispatcher, instance=True), AsyncMock()
        dispatcher.works_on.return_value = []
        journal = TokenJournal(place.folder / "journal.sqlite")
        hub = Hub("service-here", waits)
        fleet = SiteFleet(context, hub, dispatcher, waits, journal, *[told] * 3)
        fleet.lives["here-one-0"] = InstanceLife("here-one-0", "one", 0, state=Life.READY)
        try:
            await asyncio.wait_for(fleet.run(), scaled(LIMIT_S))
        finally:
            await hub.close()

    died = place.process("here-one-0", FAILS)
    started = StartedProcess("here-one-0", "instance", died.process.pid, 1, died.exit_code, died.last_words())
    write_started(place.folder, [started])
    return last_words(lambda: asyncio.run(watch()))


@provokes
def sites_differ(place: Place) -> str:
    place.write_two_sites(security={"encryption": "none"})
    cluster = load_cluster("cluster.yaml")
    address = f"tcp://127.0.0.1:{free_port()}"

    def context(name: str, site: str, lr: str) -> RoleContext:
        run = load_run("run.yaml", [f"optimizer.lr={lr}"])
        return RoleContext(name, site, place.folder, cluster, run, Addresses(address, "", {}), False)

    async def meet() -> None:
        home, west = context("controller", "here", "1e-5"), context("service-west", "west", "1e-6")
        hub = home_hub(home, "controller", WaitRegistry("controller"), home.local_flow)
        hub.bind_outside(address, None)
        link = to_home(west, "service", WaitRegistry("service-west"))
        try:
            await asyncio.wait_for(connect_home(west, link, "controller", address), scaled(LIMIT_S))
        finally:
            with contextlib.suppress(RunFailed):
                await link.close()
            await hub.close()

    return last_words(lambda: asyncio.run(meet()))


@provokes
def key_unknown(place: Place) -> str:
    place.write_two_sites(keys=("here", "west"))

    async def connect() -> None:
        link = Link("service-west", "service", WaitRegistry("service-west"))
        try:
            security = ClientSecurity.load(place.folder / "keys", "west", "here")
            await link.connect(f"tcp://127.0.0.1:{free_port()}", 0.2, security)
        finally:
            with contextlib.suppress(RunFailed):
                await link.close()

    return last_words(lambda: asyncio.run(connect()))


@provokes
def first_prompts_too_long(place: Place) -> str:
    (place.folder / "prompts.jsonl").write_text(json.dumps({"prompt": "a" * 9, "answer": "2"}))
    return place.write_run(sampling={"max_tokens": 60}).launch()


# -- rewards


def scored(place: Place, completion: str) -> str:
    (place.folder / "tiny_rewards.py").write_text(REWARDS)

    async def score() -> str:
        task = FileTask(kind="file", name="mine", path="prompts.jsonl", reward="tiny_rewards:reward")
        pool = RewardPool([task], 0, workers=1, timeout_s=0.5 if completion == "hang" else scaled(60))
        try:
            await pool.start()
            void = (await pool.score("mine", completion, {"prompt": "p", "answer": None})).void
            return void.text if void else ""
        finally:
            pool.close()

    return asyncio.run(score())


@provokes
def reward_never_works(place: Place) -> str:
    watch = VoidWatch(RunConfig.model_validate({}))
    wrong = Void(VoidCause.VERIFIER, "ValueError: not a number: 'x'")
    words = [watch.record("mine", str(number), wrong) for number in range(32)]
    return str(words[-1])


@provokes
def too_many_void(place: Place) -> str:
    watch, late = VoidWatch(RunConfig.model_validate({})), Void(VoidCause.TIMEOUT, "timed out after 20 s")
    words = [watch.record("mine", str(number), late if number else None) for number in range(128)]
    return str(words[-1])


@provokes
def steps_refused(place: Place) -> str:
    steps = RefusedSteps(KeptMicroBatches(place.folder), limit=1)
    batch, found = sent_batch(), Refusal("gradient", "model.layers.3.weight")
    steps.refused(batch, Refusal("loss", "micro-batch 0"))
    with pytest.raises(RunFailed) as ended:
        while steps.examining:
            here = {group.group_id for share in steps.next() for group in share}
            steps.examined(batch, [{key: found for key in here & {"b"}}])
    return f"error: {ended.value}"


@provokes
def computed_otherwise(place: Place) -> str:
    """The trainer and an instance, in fp32, 2 nats apart at the run's first version."""
    run = RunConfig.model_validate({"model": {"path": "my-model"}})
    watched, zeros = WeightCanary(run), np.zeros(3, np.float32)
    watched.trainer_measured(0, Measured("float32", zeros))
    (found,) = watched.instance_measured(0, "here-regular-0", Measured("float32", zeros - 2))
    nobody = SimpleNamespace(service_of=lambda instance: "service-here", exclude=AsyncMock(return_value=False))
    guard = MismatchGuard(run, nobody, nobody, Mock())  # type: ignore[arg-type]
    with pytest.raises(RunFailed) as ended:
        asyncio.run(guard.judge_canaries([found]))
    return f"error: {ended.value}"


# -- a run that goes on, or does not


@provokes
def killed_for_silence(place: Place) -> str:
    return no_sign_of_life(place, recovery={"restarts": 1, "pause_s": 0})


@provokes
def no_sign_of_life(place: Place, **run: object) -> str:
    told, status = place.folder / "told.json", place.folder / "runs" / "tiny" / "status.json"
    write_status(place.folder, make_status(1, 4, time.time()))
    (place.folder / "status.json").rename(told)
    writes_once = f"import shutil, time; shutil.copyfile({str(told)!r}, {str(status)!r}); time.sleep(3600)"
    return place.supervise({"controller": writes_once}, deadlines={"heartbeat_s": 0.5}, **run)


@provokes
def instance_died(place: Place) -> str:
    lines, now = PlainLines([]), time.time()
    status = make_status(3, 20, now)
    lines.lines(RunStatus.model_validate(status), [], now)
    status["roles"][INSTANCES[0]] |= {"state": "dead", "detail": place.process("here-tail-0", FAILS).last_words()}
    return "\n".join(lines.lines(RunStatus.model_validate(status), [], now))


@provokes
def stuck(place: Place) -> str:
    for name in ("cli.why_stuck.LOOK_S", "cli.why_stuck.LONGEST_LOOK_S", "diagnose.stuck.SILENT_AFTER_S"):
        place.monkeypatch.setattr(f"streamrl.{name}", scaled(60.0))
    run_dir, now = place.folder, time.time()
    with subprocess.Popen([sys.executable, "-c", SLEEP]) as child:
        try:
            os.kill(child.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
            write_started(run_dir, [StartedProcess("here-tail-0", "instance", child.pid)])
            wait = {"owner": "controller", "waiting_for": "here-tail-0 to answer apply_weights"}
            write_status(run_dir, make_status(3, 20, now, waits=[wait | {"since": now - 40, "limit_s": 300}]))
            place.capfd.readouterr()
            assert streamrl(place.monkeypatch, "why-stuck", str(run_dir)) == 3
            return place.capfd.readouterr().out.splitlines()[0]
        finally:
            child.kill()


@pytest.mark.parametrize("name", list(messages()))
def test_the_message_is_what_is_printed(name: str, place: Place) -> None:
    message, printed = messages()[name], PROVOKED[name](place)
    lines = printed.splitlines()
    height = len(message.splitlines())
    found = pattern(message)
    # a message is whole lines of the output; only its end may be several, in `<... lines>`
    starts = range(len(lines)) if " lines>" in message else range(len(lines) - height + 1)
    ends = {at: (len(lines) if " lines>" in message else at + height) for at in starts}
    assert any(found.fullmatch("\n".join(lines[at:end])) for at, end in ends.items()), f"{message}\n---\n{printed}"


def test_every_message_is_provoked_and_every_entry_has_one() -> None:
    assert set(PROVOKED) == set(messages())
    entries = re.split(r"^## ", DOC.read_text(), flags=re.MULTILINE)[1:]
    assert [entry.partition(".")[0] for entry in entries] == list(ErrorCode)
    for entry in entries:
        parts = [entry.find(mark) for mark in ("<!-- message: ", "**Why.**", "**Do.**")]
        assert -1 < parts[0] < parts[1] < parts[2], entry.partition("\n")[0]


def test_messages_end_with_the_code_of_their_entry_which_streamrl_explain_prints(place: Place) -> None:
    said = place.read("explain").splitlines()
    assert [line.partition(". ")[0] for line in said] == list(ErrorCode)
    for entry in re.split(r"^## (?=E)", DOC.read_text(), flags=re.MULTILINE)[1:]:
        code, _, title = entry.partition("\n")[0].partition(". ")
        assert set(re.findall(f"{SEE_DOCS}(E\\d+)", entry)) == {code}, entry.partition("\n")[0]
        told = place.read("explain", code.lower())
        assert told.startswith(f"{code}. {title}\n") and "**Do.**" in told
        assert all(mark not in told for mark in ("](", "<!--", "```"))
    told = place.read("explain", "E1013")
    assert "\n    error: <file>: no such file; site '<site>' needs its own keys" in told
    assert "(security (docs/explanation/security.md#keys))" in told
    assert "E9999: no such code; expected one of E1001, " in place.say("explain", "E9999")


def test_a_limit_that_is_changed_in_the_folders_config_yaml_is_that_of_the_resumed_run(place: Place) -> None:
    config, launched = place.save_run() / "config.yaml", list[Any]()
    config.write_text(config.read_text().replace("weights_s: 300", "weights_s: 900"))
    place.monkeypatch.setattr(supervisor, "run", lambda *given: launched.append(given))
    place.say("launch", "--resume", "runs/tiny", code=0)
    assert launched[0][1].deadlines.weights_s == 900


def test_a_placeholder_stands_for_one_line_or_for_lines_and_for_the_same_text_wherever_it_is_repeated() -> None:
    assert pattern("a <x> b").fullmatch("a 1 2 b") and not pattern("a <x> b").fullmatch("a 1 c")
    assert not pattern("a <x> b").fullmatch("a 1\n2 b") and pattern("a\n<its lines>\nb").fullmatch("a\n1\n2\nb")
    assert pattern("<x>, <x>").fullmatch("1, 1") and not pattern("<x>, <x>").fullmatch("1, 2")
    assert not pattern("(limit <x> s).").fullmatch("(limit 3 s)!")
