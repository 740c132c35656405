"""The command line: exit codes, one readable message, nothing started on bad input, no run overwritten."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamrl.cli import calibrate, launch, track
from streamrl.cli import main as cli
from streamrl.config.cluster import ClusterConfig
from streamrl.config.load import load_cluster, load_run, save_resolved
from streamrl.config.run import RunConfig
from streamrl.errors import RunFailed, UserError
from streamrl.launcher import supervisor
from streamrl.machine.probe import Probe
from streamrl.run_dir import layout
from streamrl.run_dir.checkpoint_sums import STATE_FILE, TENSORS_FILE
from streamrl.run_dir.evaluations import EvaluationRow, Scores
from streamrl.run_dir.jsonl import RowWriter
from streamrl.run_dir.status import write_status
from streamrl.verify import hardware_checks
from streamrl.verify.hardware_checks import StageResult
from tests.cli.calling import streamrl
from tests.report.synthetic import START, make_status, write_run
from tests.tiny_model import save_tiny_model
from tests.waiting import scaled

CLUSTER = (
    "hardware: cpu\nsites:\n  here:\n    trainer: {threads: 1}\n    generation: [{name: one, kv_cache_gb: 0.05}]\n"
)
RUN = (
    "name: tiny\nsteps: 4\nmodel: {path: model, max_context: 64}\nsampling: {max_tokens: 8}\n"
    "tasks: [{kind: file, name: mine, path: prompts.jsonl, reward: exact_match}]\n"
)


class Result:
    """What a command left: exit code and output."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


class Terminal:
    """A folder with all files of a run, in which commands are called; launches are recorded, not done."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.monkeypatch, self.capsys = folder, monkeypatch, capsys
        self.launched: list[tuple[ClusterConfig, RunConfig, Path, bool, bool]] = []
        self.failure: BaseException | None = None
        monkeypatch.chdir(folder)
        monkeypatch.setattr(supervisor, "run", self._run)
        (folder / "cluster.yaml").write_text(CLUSTER)
        (folder / "run.yaml").write_text(RUN)
        (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "1+1", "answer": "2"}))

    def _run(
        self,
        cluster: ClusterConfig,
        run: RunConfig,
        run_dir: Path,
        resume: bool,
        plain: bool,
        site: str | None,
        emulate: bool,
    ) -> None:
        assert (site, emulate) == (None, False)
        self.launched.append((cluster, run, run_dir, resume, plain))
        if self.failure is not None:
            raise self.failure
        save_resolved(run_dir, cluster, run)

    def __call__(self, *arguments: str) -> Result:
        self.monkeypatch.setattr(sys, "argv", ["streamrl", *arguments])
        code: Any = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        captured = self.capsys.readouterr()
        return Result(code, captured.out, captured.err)

    def launch(self, *arguments: str) -> Result:
        return self("launch", "--cluster", "cluster.yaml", "--run", "run.yaml", *arguments)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def terminal(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Terminal:
    (tmp_path / "model").symlink_to(model)
    return Terminal(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_every_command_shows_an_example(terminal: Terminal, command: str) -> None:
    result = terminal(command, "--help")
    assert result.code == 0
    assert f"  streamrl {command} " in result.out.partition("Example")[2]


def test_the_list_of_commands_holds_exactly_the_modules(terminal: Terminal) -> None:
    modules = {path.stem.replace("_", "-") for path in Path(cli.__file__).parent.glob("*.py")}
    assert set(cli.COMMANDS) == modules - {"main", "--init--"}
    assert all(command in terminal("--help").out for command in cli.COMMANDS)


def test_an_unknown_command_suggests_the_nearest(terminal: Terminal) -> None:
    result = terminal("lunch")
    assert result.code == 2
    assert "Did you mean 'launch'?" in result.err


def test_no_hidden_option_is_suggested(terminal: Terminal) -> None:
    assert "--folder" not in terminal("launch", "--foo").err
    assert "'--steps'" in terminal("launch", "--step").err


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (RunFailed("trainer died\nKilled"), 1),
        (UserError("no"), 2),
        (supervisor.Interrupted("stopped"), 130),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(terminal: Terminal, failure: BaseException, code: int) -> None:
    terminal.failure = failure
    result = terminal.launch()
    assert result.code == code
    assert all(line in result.err for line in str(failure).splitlines())
    assert "Traceback" not in result.err


def test_what_is_written_to_closed_outputs_goes_nowhere_and_no_file_takes_their_place(terminal: Terminal) -> None:
    kept = [os.dup(file) for file in (1, 2)]
    os.closerange(1, 3)
    for name in ("stdout", "stderr"):
        terminal.monkeypatch.setattr(sys, name, None)
    try:
        code = streamrl(terminal.monkeypatch, "launch", "--cluster", "cluster.yaml", "--run", "nowhere.yaml")
        found = [os.fstat(file).st_rdev for file in (1, 2)]
        inherited = [os.get_inheritable(file) for file in (1, 2)]
        streams = sys.stdout, sys.stderr
    finally:
        for file, one in enumerate(kept, 1):
            os.dup2(one, file)
            os.close(one)
    assert code == 2 and found == [os.stat(os.devnull).st_rdev] * 2 and inherited == [True] * 2
    for stream in streams:
        stream.write("nowhere")
        stream.close()


def test_a_launch_that_is_stopped_before_it_has_written_anything_leaves_the_name_free(terminal: Terminal) -> None:
    terminal.failure = KeyboardInterrupt()
    assert terminal.launch().code == 130
    assert terminal.launched and not (terminal.folder / "runs" / "tiny").exists()


def test_launch_starts_the_resolved_run(terminal: Terminal) -> None:
    result = terminal.launch("--set", "optimizer.lr=1e-4", "--steps", "7", "--plain")
    assert result.code == 0, result.err
    [(cluster, run, run_dir, resume, plain)] = terminal.launched
    assert cluster == load_cluster("cluster.yaml")
    assert run == load_run("run.yaml", ["optimizer.lr=1e-4", "steps=7"])
    assert (run_dir, resume, plain) == (Path("runs/tiny"), False, True)


def test_no_run_is_overwritten(terminal: Terminal) -> None:
    for _ in range(3):
        terminal.launch()
    assert [run_dir.name for _, _, run_dir, _, _ in terminal.launched] == ["tiny", "tiny-2", "tiny-3"]


def test_a_folder_that_another_launch_made_during_the_checks_is_left_to_it(terminal: Terminal) -> None:
    check = launch._check

    def slow_check(*arguments: Any) -> Any:
        for name in ("tiny", "tiny-2"):
            (terminal.folder / "runs" / name).mkdir(parents=True)
        return check(*arguments)

    terminal.monkeypatch.setattr(launch, "_check", slow_check)
    result = terminal.launch()
    assert result.code == 0, result.err
    assert [run_dir for _, _, run_dir, _, _ in terminal.launched] == [Path("runs/tiny-3")]
    assert "runs/tiny is another run's by now: this one is in runs/tiny-3\n" in result.out


def test_a_launch_alone_says_nothing_of_others(terminal: Terminal) -> None:
    assert "another run" not in terminal.launch().out
    assert (terminal.folder / "runs" / "tiny").is_dir()


def test_a_launch_takes_a_folder_that_was_made_for_it_only_while_it_is_empty(terminal: Terminal) -> None:
    assert "--folder" not in terminal("launch", "--help").out
    folder = terminal.folder / "elsewhere" / "mine"
    refused = f"--folder {folder}: expected an empty folder"
    assert refused in terminal.launch("--folder", str(folder)).err
    folder.mkdir(parents=True)
    assert terminal.launch("--folder", str(folder)).code == 0
    assert refused in terminal.launch("--folder", str(folder)).err
    assert [run_dir for _, _, run_dir, _, _ in terminal.launched] == [folder]


def test_a_demo_begins_in_a_folder_of_its_own(terminal: Terminal) -> None:
    started: list[Path] = []
    runs = terminal.folder / "runs"
    terminal.monkeypatch.setattr(launch, "_check", lambda *_: (runs / "tiny").mkdir(parents=True))
    terminal.monkeypatch.setattr(
        supervisor, "run", lambda cluster, run, run_dir, resume, plain: started.append(run_dir)
    )
    launch.start(load_cluster("cluster.yaml"), load_run("run.yaml"), runs, True)
    assert started == [runs / "tiny-2"] and started[0].is_dir()


def test_resuming_takes_everything_from_the_folder(terminal: Terminal) -> None:
    terminal.launch("--set", "seed=5")
    (terminal.folder / "cluster.yaml").unlink()
    (terminal.folder / "run.yaml").unlink()
    assert terminal("launch", "--resume", "runs/tiny", "--steps", "9").code == 0
    _, run, run_dir, resume, _ = terminal.launched[-1]
    assert (run.seed, run.steps, run_dir, resume) == (5, 9, Path("runs/tiny"), True)


@pytest.mark.parametrize(("arguments", "steps"), [((), 9), (("--steps", "7"), 7)])
def test_a_resumed_run_takes_its_steps_from_set_too(terminal: Terminal, arguments: tuple[str, ...], steps: int) -> None:
    terminal.launch()
    result = terminal("launch", "--resume", "runs/tiny", "--set", "steps=9", *arguments)
    assert result.code == 0, result.err
    assert terminal.launched[-1][1].steps == steps


def test_a_resumed_run_refuses_steps_that_no_run_can_have(terminal: Terminal) -> None:
    terminal.launch()
    for steps in ("0", "many"):
        result = terminal("launch", "--resume", "runs/tiny", "--set", f"steps={steps}")
        assert result.code == 2 and f"--set steps={steps}: " in result.err
    assert len(terminal.launched) == 1


def test_a_resumed_run_is_checked_in_its_own_folder(terminal: Terminal) -> None:
    terminal.launch()
    access = os.access
    refused = [Path("runs").absolute()]
    terminal.monkeypatch.setattr(
        os, "access", lambda path, mode, **how: path not in refused and access(path, mode, **how)
    )
    assert terminal.launch().code == 2
    result = terminal("launch", "--resume", "runs/tiny", "--steps", "9")
    assert result.code == 0, result.err
    (checkpoints := Path("runs/tiny/checkpoints")).mkdir()
    refused.append(checkpoints)
    result = terminal("launch", "--resume", "runs/tiny", "--steps", "9")
    assert result.code == 2 and f"--resume runs/tiny: cannot read and write in {checkpoints}" in result.err
    refused.append(Path("runs/tiny").absolute())
    result = terminal("launch", "--resume", "runs/tiny", "--steps", "9")
    assert result.code == 2 and f"--resume runs/tiny: cannot write to {refused[-1]}" in result.err


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_resume_that_computes_in_another_type_than_the_run_before_warns(
    terminal: Terminal, dry: tuple[str, ...]
) -> None:
    terminal.monkeypatch.setattr("streamrl.machine.compute_type.probe", lambda folder: Probe(2.0, 60.0))
    terminal.launch()
    tensors = terminal.folder / "runs" / "tiny" / "checkpoints" / "step_2" / "trainer_state" / ".metadata"
    tensors.parent.mkdir(parents=True)
    for file in (tensors, tensors.parents[1] / "state.json"):
        file.write_text("{}")
    status = make_status(2, 5, START)
    status["roles"]["trainer"] |= {"dtype": "bfloat16", "dtype_why": "AMX"}
    write_status(terminal.folder / "runs" / "tiny", status)
    result = terminal("launch", "--resume", "runs/tiny", "--steps", "9", *dry)
    assert result.code == 0, result.err
    assert "warning: model.dtype: trainer computed in bfloat16 before, and from checkpoint runs/tiny/" in result.err


def test_a_resumed_run_cannot_change_what_it_trains(terminal: Terminal) -> None:
    terminal.launch()
    assert terminal("launch", "--resume", "runs/tiny", "--set", "seed=1").code == 2
    assert terminal("launch", "--resume", "runs/tiny", "--run", "run.yaml").code == 2
    assert len(terminal.launched) == 1


def test_a_resumed_run_is_refused_what_only_its_new_cluster_file_brings(terminal: Terminal) -> None:
    pushed = ("--set", "weights.backend=gloo", "--set", "deadlines.weights_s=90000")  # ranks would wait too long
    assert terminal.launch(*pushed).code == 0
    more_ranks = yaml.safe_load(CLUSTER)
    more_ranks["sites"]["here"]["trainer"]["ranks"] = 2
    Path("more.yaml").write_text(yaml.safe_dump(more_ranks))
    resume = ("launch", "--resume", "runs/tiny", "--steps", "9", "--cluster")
    result = terminal(*resume, "more.yaml")
    assert result.code == 2 and "deadlines.weights_s is 90000: with weights.backend: gloo" in result.err
    assert terminal(*resume, "cluster.yaml").code == 0
    save_resolved(Path("runs/tiny"), load_cluster("more.yaml"), terminal.launched[-1][1])  # as of an earlier version
    result = terminal(*resume, "more.yaml")
    assert result.code == 0 and "warning: deadlines.weights_s is 90000" in result.err


def write_checkpoint(run_dir: Path, step: int) -> None:
    """Write as much of a checkpoint as is looked at before a run."""
    for name in (STATE_FILE, TENSORS_FILE):
        path = run_dir / layout.CHECKPOINTS / f"step_{step}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")


def test_a_finished_run_says_how_to_train_it_further(terminal: Terminal) -> None:
    terminal.launch()
    write_checkpoint(terminal.folder / "runs/tiny", 4)
    result = terminal("launch", "--resume", "runs/tiny")
    assert result.code == 2
    assert "has done 4 of 4 steps; --steps 8" in result.err
    assert terminal("launch", "--resume", "runs/tiny", "--steps", "6").code == 0


def test_a_run_that_was_stopped_in_its_last_evaluation_goes_on(terminal: Terminal) -> None:
    (terminal.folder / "held_out.jsonl").write_text(json.dumps({"prompt": "2+2", "answer": "4"}))
    task = "{kind: file, name: sums, path: held_out.jsonl, reward: exact_match}"
    result = terminal.launch("--set", f"evaluation={{every: 2, prompts: 1, samples: 1, tasks: [{task}]}}")
    assert result.code == 0, result.err
    write_checkpoint(terminal.folder / "runs/tiny", 4)
    scores = Scores(prompts=1, samples=1, length_mean=1.0)
    rest: dict[str, Any] = {"overall": scores, "by_task": {}, "other_version_share": 0.0}
    with RowWriter(terminal.folder / "runs/tiny" / layout.EVALUATIONS, EvaluationRow) as rows:
        rows.append(EvaluationRow(step=2, time=1.0, seconds=1.0, **rest))
        assert terminal("launch", "--resume", "runs/tiny").code == 0
        assert "has done 4 of 3 steps" in terminal("launch", "--resume", "runs/tiny", "--steps", "3").err
        assert terminal("launch", "--resume", "runs/tiny", "--steps", "4").code == 0
        rows.append(EvaluationRow(step=4, time=2.0, seconds=1.0, **rest))
    assert "has done 4 of 4 steps" in terminal("launch", "--resume", "runs/tiny").err


def test_dry_run_prints_every_process_and_starts_nothing(terminal: Terminal) -> None:
    result = terminal.launch("--dry-run", "--set", "schedule={name: sync}")
    assert result.code == 0, result.err
    for word in ("controller", "trainer", "service-here", "here-one-0", "rewards-here", "mine", "sync", "model"):
        assert word in result.out
    assert terminal.launched == []
    assert not (terminal.folder / "runs").exists()


@pytest.mark.parametrize("dry", [True, False])
def test_a_launch_says_what_takes_long_before_it_does_it_and_a_dry_run_beside_its_plan(
    terminal: Terminal, dry: bool
) -> None:
    terminal.monkeypatch.setenv("STREAMRL_CACHE", str(terminal.folder / "cache"))
    terminal.monkeypatch.setattr("streamrl.machine.probe.cpu_seconds", lambda product: 1e-3)
    lines = [
        "reading the configuration and checking this machine",
        "measuring how fast this CPU multiplies in bfloat16 and in float32, once on this machine",
        "proving how groups of this model's architecture can be packed (up to a minute), once on this machine",
    ]
    for known in (0, 2):  # the second time, what was measured is kept
        result = terminal.launch(*["--dry-run"] * dry)
        assert result.code == 0, result.err
        said, other = (result.err, result.out) if dry else (result.out, result.err)
        found = said.splitlines()
        assert sorted(line for line in found if line in lines) == sorted(lines[: len(lines) - known])
        assert found[0] == lines[0] and not any(line in other for line in lines)


def test_dry_run_says_how_the_trainers_ranks_divide_the_work(terminal: Terminal) -> None:
    save_tiny_model(terminal.folder / "model", kv_heads=2)
    alone = (terminal.folder / "cluster.yaml").read_text()
    shown = {}
    for keys in ("{}", "{ranks: 4}", "{ranks: 4, sequence_parallel: 2}", "{ranks: 4, tensor_parallel: 2}"):
        (terminal.folder / "cluster.yaml").write_text(re.sub(r"trainer: *\{[^}]*\}", f"trainer: {keys}", alone))
        result = terminal.launch("--dry-run", "--set", "schedule={name: sync}")
        assert result.code == 0, result.err
        assert ("4 x 2 CPU thread(s)" in result.out) == (keys != "{}")
        shown[keys] = [line.split(maxsplit=1)[1] for line in result.out.splitlines() if line.startswith("ranks ")]
    assert list(shown.values()) == [
        [],
        ["4, each with micro-batches of its own"],
        ["4 in 2 group(s) of 2 that share each row of tokens"],
        ["4 in 2 group(s) of 2 that split each layer"],
    ]


SEVERAL = """
hardware: cuda
sites:
  home: {address: home.example.org, port: 5600, trainer: {ranks: 4}}
  there: {generation: [{name: one, replicas: 2}]}
  far: {generation: [{name: two}]}
links:
- {between: [home, there], bandwidth_gbit_s: 10, rtt_ms: 2}
- {between: [home, far], bandwidth_gbit_s: 1, rtt_ms: 90}
"""


def test_dry_run_prints_the_plan_of_all_sites(terminal: Terminal) -> None:
    (terminal.folder / "cluster.yaml").write_text(SEVERAL)
    result = terminal.launch("--dry-run", "--set", "schedule={name: sync}")
    assert result.code == 0, result.err
    for name in ("controller", "trainer", "service-there", "there-one-0 to 1", "service-far", "far-two-0"):
        assert name in result.out
    for words in ("link home - there", "10 Gbit/s", "link home - far", "90 ms", "curve"):
        assert words in result.out
    # no GPUs, no keys, a port of another machine: nothing for this one to refuse
    _, unchecked, untried = result.err.splitlines()
    assert unchecked.startswith("warning: not checked: ") and "GPUs, ports, keys" in unchecked
    assert untried.startswith("warning: never run so far: trainer and instances on GPUs of their own")
    assert "4 trainer ranks over NCCL" in untried
    assert not (terminal.folder / "runs").exists()
    assert terminal.launch("--set", "schedule={name: sync}").code == 2  # without --dry-run it has to be told which


def test_dry_run_folds_alike_instances_into_one_row(terminal: Terminal) -> None:
    (terminal.folder / "cluster.yaml").write_text(
        SEVERAL.replace("replicas: 2", "replicas: 24, gpus_per_replica: 2, gpu: H20")
    )
    result = terminal.launch("--dry-run", "--set", "schedule={name: sync}")
    assert result.code == 0, result.err
    table = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.out.splitlines() if "│" in line]
    rows = {row[0]: row[4:] for row in table}
    assert rows["there-one-0 to 23"] == ["GPU 0 to 47 (H20), 2 each", "24 x 0.00"]
    assert rows["far-two-0"] == ["GPU 0", "0.00"]
    assert rows["trainer"] == ["GPU 0 to 3", "0.00"]


def test_dry_run_of_all_sites_refuses_what_no_site_can_do(terminal: Terminal) -> None:
    (terminal.folder / "cluster.yaml").write_text(SEVERAL.replace(", port: 5600", ""))
    result = terminal.launch("--dry-run", "--set", "schedule={name: colocated}")
    assert result.code == 2
    assert "gives the same devices" in result.err and "sites.home.port" in result.err


def test_dry_run_of_all_sites_needs_no_model_here(terminal: Terminal) -> None:
    (terminal.folder / "cluster.yaml").write_text(SEVERAL)
    result = terminal.launch("--dry-run", "--set", "schedule={name: sync}", "--set", "model.path=/models/elsewhere")
    assert result.code == 0, result.err
    assert "warning: on this machine: model.path: /models/elsewhere" in result.err
    assert "/models/elsewhere -> not on this machine" in result.out


def test_dry_run_of_all_sites_downloads_no_model(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def cached(hub_id: str, local_files_only: bool = False, **options: object) -> str:
        assert local_files_only, f"{hub_id} would be downloaded"
        if hub_id == "owner/cached":
            return str((terminal.folder / "model").resolve())
        raise FileNotFoundError

    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached)
    (terminal.folder / "cluster.yaml").write_text(SEVERAL)
    asked = ["--dry-run", "--set", "schedule={name: sync}", "--set"]
    result = terminal.launch(*asked, "model.path=owner/name")
    assert result.code == 0, result.err
    assert "owner/name is not in the local cache, and nothing is downloaded for a plan" in result.err
    assert "owner/name -> not on this machine" in result.out
    result = terminal.launch(*asked, "model.path=owner/cached", "--set", "model.max_context=1000000")
    assert result.code == 2 and "positions, 1000000 are asked for" in result.err  # what is here is checked


def test_all_problems_are_told_at_once_and_nothing_starts(terminal: Terminal) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (terminal.folder / "cluster.yaml").write_text(
            f"hardware: cpu\nsites:\n  here:\n    port: {port}\n    trainer: {{}}\n    generation: [{{}}]\n"
        )
        (terminal.folder / "run.yaml").write_text(
            "model: {path: modle}\n"
            "tasks:\n- {kind: reasoning_gym, name: chain_sun}\n"
            "- {kind: reasoning_gym, name: chain_sum, config: {min_terms: 9}}\n"
            "- {kind: file, name: a, path: none.jsonl}\n"
            "- {kind: file, name: b, path: prompts.jsonl, prompt_column: question}\n"
            "- {kind: file, name: c, path: prompts.jsonl, reward: 'no_such_module:f'}\n"
        )
        result = terminal.launch()
    assert result.code == 2
    lines = result.err.splitlines()
    for words in (
        "did you mean model",
        "did you mean chain_sum",
        "chain_sum refuses its config",
        "none.jsonl",
        "question",
        "no_such_module",
        f"cannot listen on 127.0.0.1:{port}: Address already in use",
    ):
        assert any(words in line for line in lines), (words, lines)
    assert "Traceback" not in result.err
    assert terminal.launched == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["launch"], "--cluster FILE is needed"),
        (["launch", "--cluster", "clutser.yaml"], "did you mean cluster.yaml"),
        (["launch", "--cluster", "cluster.yaml", "--set", "stps=1"], "did you mean 'steps'"),
        (["launch", "--cluster", "cluster.yaml", "--steps", "0"], "--steps"),
        (["launch", "--resume", "runs"], "is not a run's folder"),
        (["fetch-model", "smollm2-135"], "did you mean smollm2-135m"),
        (["schema", "runs"], "'cluster', 'run'"),
        (["replay", "run.yaml", "3"], "run.yaml is not a run's folder"),
        (["calibrate", "--cluster", "none.yaml", "--engine", "--out", "x"], "--out does not go with --engine"),
        (["calibrate", "--cluster", "none.yaml", "--engine", "--seconds", "9"], "--seconds does not go with"),
        (
            ["calibrate", "--cluster", "cluster.yaml", "--pool", "two"],
            "no such generation pool; expected one of here/one",
        ),
        (
            ["calibrate", "--cluster", "cluster.yaml", "--site", "far"],
            "--site far: cluster.yaml has no such",
        ),
        (["verify", "nomodel"], "error: MODEL: nomodel is neither a folder, nor a hub id"),
        (["verify", "--hardware", "--out", "nowhere/x.json"], "--out nowhere/x.json: its folder does not exist"),
        (["verify", "--hardware", "--out", "."], "--out .: is a folder"),
        (["calibrate", "--cluster", "cluster.yaml", "--out", "."], "--out .: is a folder"),
        (["simulate", "--out", "."], "--out .: is a folder"),
        (["plan", "--cluster", "cluster.yaml", "--json", "."], "--json .: is a folder"),
        (["plan", "--cluster", "cluster.yaml", "--json", "no/plan.json"], "--json no/plan.json: its folder does not"),
        (["train-ranker", "x", "--out", "r", "--report", "no/r.html"], "--report no/r.html: its folder does not exist"),
    ],
)
def test_bad_input_gets_one_message_and_exit_code_2(terminal: Terminal, arguments: list[str], words: str) -> None:
    result = terminal(*arguments)
    assert result.code == 2
    assert words in result.err
    assert "Traceback" not in result.err
    assert terminal.launched == []


def test_what_a_measurement_needs_and_is_not_installed_is_named(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else found(name))
    result = terminal("calibrate", "--cluster", "cluster.yaml")
    assert result.code == 2 and "not installed: vllm; install with: pip install 'streamrl[cpu,tasks]'" in result.err


TWO_SITES = """
hardware: cuda
sites:
  home: {port: 5600, trainer: {}, generation: [{gpu: H800}]}
  far: {generation: [{name: other, gpu: H20}, {gpu: H20}]}
links: [{between: [home, far], bandwidth_gbit_s: 10, rtt_ms: 2}]
"""


def test_the_pool_that_is_measured_is_the_first_or_the_one_of_the_named_site() -> None:
    cluster = ClusterConfig.model_validate(yaml.safe_load(TWO_SITES))

    def chosen(pool: str | None, site: str | None) -> tuple[str, str, str]:
        where, one = calibrate._chosen(cluster, Path("two.yaml"), pool, site)
        return where, one.name, one.gpu

    assert chosen(None, None) == ("home", "regular", "H800")
    assert chosen("regular", "far") == ("far", "regular", "H20")
    assert chosen(None, "far") == chosen("other", None) == ("far", "other", "H20")
    with pytest.raises(UserError, match=r"^--pool regular could be home/regular or far/regular: name its --site$"):
        chosen("regular", None)


def test_a_measured_machine_is_told_where_its_figures_could_not_be_written(terminal: Terminal) -> None:
    orders: list[str] = []

    def check(say: object) -> list[StageResult]:
        orders.append(os.environ["CUDA_DEVICE_ORDER"])
        (terminal.folder / "out").rmdir()
        return []

    terminal.monkeypatch.setenv("CUDA_DEVICE_ORDER", "")  # put back at the end
    terminal.monkeypatch.delenv("CUDA_DEVICE_ORDER")
    terminal.monkeypatch.setattr(hardware_checks, "check_hardware", check)
    (terminal.folder / "out").mkdir()
    result = terminal("verify", "--hardware", "--out", "out/x.json")
    assert (result.code, result.err) == (2, "error: --out out/x.json: No such file or directory\n")
    assert orders == ["PCI_BUS_ID"], "the numbers of nvidia-smi"


def test_warnings_do_not_stop_a_run(terminal: Terminal) -> None:
    text = CLUSTER.replace("threads: 1", "threads: 4000")
    (terminal.folder / "cluster.yaml").write_text(text)
    result = terminal.launch()
    assert result.code == 0
    assert "warning: the cluster file asks for 4001 computing threads" in result.err
    assert len(terminal.launched) == 1


@pytest.mark.parametrize(("which", "key"), [("cluster", "sites"), ("run", "optimizer")])
def test_schema_is_json_schema_with_descriptions_and_refuses_unknown_keys(
    terminal: Terminal, which: str, key: str
) -> None:
    schema = json.loads(terminal("schema", which).out)
    assert key in schema["properties"]
    assert schema["additionalProperties"] is False
    assert "description" in json.dumps(schema["$defs"])


def test_a_report_that_cannot_be_written_is_told(terminal: Terminal) -> None:
    write_run(terminal.folder / "demo", 0, rollouts=False, trace=False)
    (terminal.folder / "demo" / "report.html" / "mine").mkdir(parents=True)
    result = terminal("report", "demo")
    assert result.code == 2 and "Traceback" not in result.err
    assert result.err.startswith("error: demo: its report cannot be written: ")


def test_a_terminal_without_utf8_shows_a_run_with_other_characters(tmp_path: Path) -> None:
    write_run(tmp_path / "demo", 3, rollouts=False, trace=False)
    command = [sys.executable, "-m", "streamrl.cli.main", "status", str(tmp_path / "demo")]
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, timeout=scaled(60), env=env)
    assert (done.returncode, done.stderr) == (0, b"")
    assert re.search(rb"reward +\?{3} +0\.100 to 0\.200 over 3 steps", done.stdout)


def test_what_a_server_of_a_tracker_says_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    track._say("mlflow", "takes nothing now (\x1b[2J)")
    assert capsys.readouterr().out == "tracker mlflow takes nothing now (?[2J)\n"


def test_a_calibration_is_printed_once_it_is_written_and_what_cannot_be_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "curve.json"

    def told(text: str) -> None:
        assert json.loads(out.read_text()) == {"load": "none"}
        print(text)

    with monkeypatch.context() as patch:
        patch.setattr(calibrate.click, "echo", told)
        calibrate._keep(out, {"load": "none"}, ["batch 1: 7 ms", "prefill"])
    assert capsys.readouterr().out == f"batch 1: 7 ms\nprefill\ncalibration written to {out}\n"
    with pytest.raises(UserError, match=r"curve\.json: nothing was kept of this: No such file"):
        calibrate._keep(tmp_path / "gone" / "curve.json", {}, ["batch 1: 7 ms"])
    assert capsys.readouterr().out == "batch 1: 7 ms\n"
