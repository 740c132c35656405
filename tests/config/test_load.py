"""A configuration mistake is told with file, line, key, what is there and what should be; all of them at once."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler.dispatch.baselines import LeastLoaded
from scheduler.dispatch.policy_kinds import offer
from scheduler.dispatch.registry import AUTO, DEFAULTS, POLICIES
from scheduler.schedule.schedules import KINDS, NAMES, make_schedule
from streamrl.config.cluster import ClusterConfig
from streamrl.config.dispatching import DispatchConfig
from streamrl.config.load import RESOLVED_NAME, ConfigError, load_cluster, load_resolved, load_run, save_resolved
from streamrl.config.run import RunConfig
from streamrl.config.schedule import SCHEDULES
from streamrl.config.tasks import FileTask, default_tasks
from streamrl.errors import UserError
from tests.mere_user import without_right_to
from tests.run_dir.conftest import Disk
from tests.run_dir.conftest import disk as disk

ROOT = Path(__file__).parents[2]
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(text: str) -> Path:
        path = tmp_path / "file.yaml"
        path.write_text(text)
        return path

    return write_file


def run_errors(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_run(path, overrides)
    assert isinstance(caught.value, UserError) and caught.value.exit_code == 2
    return str(caught.value).replace(str(path), "F").splitlines()


def cluster_errors(path: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    return str(caught.value).replace(str(path), "F").splitlines()


def test_the_files_of_the_repository_are_valid() -> None:
    for path in sorted((ROOT / "cluster_configs").glob("*.yaml")):
        load_cluster(path)
    for path in sorted((ROOT / "experiments").glob("runs/*.yaml")):
        load_run(path)
    demo = load_run(ROOT / "examples/demo.yaml")
    assert demo.tasks == default_tasks()
    assert demo.optimizer.lr == 1e-5


def test_no_run_file_and_an_empty_one_are_all_defaults(write: Write) -> None:
    assert load_run(None) == load_run(write("")) == load_run(write("# nothing\n")) == RunConfig()


def test_every_mistake_of_a_file_is_told_in_one_message_in_its_order(write: Write) -> None:
    path = write(
        "batch:\n"
        "  promts_per_step: 8\n"
        "  samples_per_prompt: 0\n"
        "lr: 3\n"
        "schedule:\n"
        "  name: strem\n"
        "tasks:\n"
        "- kind: reasoning_gym\n"
        "  nam: x\n"
        "- kind: reasoning_gim\n"
        "  name: y\n"
        "- name: z\n"
        "steps: many\n"
        "name: 5\n"
        "model:\n"
        "  dtype: fp16\n"
    )
    errors = run_errors(path)
    assert [line.split(": ")[0] for line in errors] == [f"F:{line}" for line in (2, 3, 4, 6, 8, 9, 10, 12, 13, 14, 16)]
    assert "unknown key 'batch.promts_per_step'; did you mean 'prompts_per_step'?" in errors[0]
    assert errors[1] == "F:3: 'batch.samples_per_prompt' is 0, expected at least 1"
    assert "did you mean 'optimizer.lr'?" in errors[2]
    assert errors[3] == "F:6: 'schedule.name' is 'strem', expected one of: colocated, sync, stream, " + (
        "one_step_off, async, auto; did you mean stream?"
    )
    assert "key 'tasks.0.name' is missing" in errors[4]
    assert "unknown key 'tasks.0.nam'; did you mean 'name'?" in errors[5]
    assert "expected one of: reasoning_gym, file, hf_dataset, agent; did you mean reasoning_gym?" in errors[6]
    assert "key 'tasks.2.kind' is missing" in errors[7]
    assert errors[8] == "F:13: 'steps' is 'many', expected a whole number"
    assert "'name' is 5, expected text" in errors[9]
    assert errors[10] == "F:16: 'model.dtype' is 'fp16', expected one of: auto, bfloat16, float32 (see docs: E1001)"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- 1\n", "F: expected keys with values ('key: value'), found a list"),
        ("a: [1\nb: x\n", "F:2: not valid YAML: while parsing a flow sequence, expected ',' or ']', but got ':'"),
        ("\tx: 1\n", "F:1: not valid YAML: while scanning for the next token, found character"),
        ("steps: 1\nseed: 2\nsteps: 3\n", "F:3: key 'steps' again, first on line 1"),
        ("batch:\n  a: 1\n  a: 1\n", "F:3: key 'a' again, first on line 2"),
        (
            "batch: {prompts_per_step: 3, prompts_per_step: 5}\n",
            "F:1: key 'prompts_per_step' again, first on line 1",
        ),
        ("sampling:\n  max_tokens: 2000\n", "F:2: sampling.max_tokens (2000) leaves no room for a prompt"),
        ("tasks:\n", "F:1: 'tasks' is empty, expected a list"),
        ("tasks: []\n", "F:1: 'tasks' is [], expected at least one entry"),
        ("name: a/b\n", "F:1: 'name' is 'a/b', expected text that matches"),
        ("sampling:\n  top_k: 3\n  min_p: 2\n", "F:3: 'sampling.min_p' is 2, expected at most 1"),
        ("sampling:\n  top_k: 1\n", "F:2: 'sampling.top_k' is 1, which leaves only the likeliest token"),
        ("sampling:\n  min_p: 1\n", "F:2: 'sampling.min_p' is 1, which leaves only the likeliest token"),
        ("sampling:\n  stop: ['']\n", "F:2: 'sampling.stop.0'"),
        (
            "algorithm:\n  name: reinforce_pp\nbatch:\n  prompts_per_step: 1\n  samples_per_prompt: 1\n",
            "F:4: 'batch.prompts_per_step' is 1, as is batch.samples_per_prompt, and advantage: batch compares the "
            "samples of a batch: every advantage would be 0",
        ),
        (
            "algorithm: {name: ppo, critic: {}, whiten_advantages: true}\nsampling: {max_tokens: 1}\n"
            "batch: {prompts_per_step: 1, samples_per_prompt: 1}\n",
            "F:1: 'algorithm.whiten_advantages' makes every advantage 0: the only token of a step",
        ),
        (
            "sampling:\n  min_p: 0.1\nspeculation:\n  method: auto\n",
            "F:2: sampling.min_p (0.1) does not go with speculation.method auto: vLLM would leave min_p out",
        ),
        (
            "algorithm: {name: grpo, router_replay: true}\nspeculation:\n  method: auto\n",
            "F:1: algorithm.router_replay records the experts of one token per step, and speculation.method",
        ),
        (
            "algorithm: {name: grpo, router_replay: true}\ntasks:\n- {kind: agent, name: a, run: m:f, path: p}\n",
            "F:1: algorithm.router_replay: the rows of task 'a', of kind agent, have no experts",
        ),
        ("speculation:\n  method: eagle\n", "F:2: 'speculation.method' is 'eagle', expected one of: none, auto, ngram"),
        (
            "optimizer:\n  decay: exp\n",
            "F:2: 'optimizer.decay' is 'exp', expected one of: constant, linear, cos",
        ),
        ("algorithm: {name: grpo, entropy_coef: -1}\n", "F:1: 'algorithm.entropy_coef' is -1, expected at least 0"),
        ("batch: {epochs: 0}\n", "F:1: 'batch.epochs' is 0, expected at least 1"),
        ("batch: {mini_batches: 3}\n", "F:1: 'batch': mini_batches (3) must divide prompts_per_step (8) into equal"),
        (
            "batch:\n  mini_batches: 2\n",
            "F:2: batch.mini_batches (2) are drawn from the whole batch, but schedule stream trains on groups as",
        ),
        (
            "algorithm: {name: ppo, critic: {value_clip: 0.2}}\n",
            "F:1: algorithm.critic.value_clip never clips where a batch has one update",
        ),
        (
            "batch:\n  epochs: 2\nalgorithm: {name: rloo}\n",
            "F:2: batch.epochs and mini_batches above 1 train on samples of older weights, which surrogate: reinforce",
        ),
        (
            "schedule: {name: auto}\nelasticity: {enabled: true}\n",
            "F:2: elasticity.enabled does not go with schedule: auto, which divides the devices among the instances",
        ),
        *(
            (
                f"schedule: {{name: {name}}}\nelasticity: {{enabled: true}}\n",
                f"F:2: elasticity.enabled does not go with schedule: {name}, whose training never covers generation",
            )
            for name in ("sync", "colocated")
        ),
        (
            "schedule: {name: stream, sync_every: 4}\nalgorithm: {name: rloo}\n",
            "F:1: schedule.sync_every (4) trains on samples of older weights, which surrogate: reinforce ignores: "
            "choose off_policy.correction: truncate, or surrogate: clip, or sync_every: 1",
        ),
        (
            "schedule: {name: async, max_staleness: 2, sync_every: 2}\nalgorithm: {name: rloo}\n",
            "F:1: schedule.sync_every (2) trains on samples of older weights, which surrogate: reinforce",
        ),
        ("optimizer:\n  decay_steps: 3\n", "F:1: 'optimizer': decay_steps belongs to decay: wsd, got decay: constant"),
        (
            "steps: 9\noptimizer:\n  decay: wsd\n  decay_steps: 8\n  warmup_steps: 2\n",
            "F:4: optimizer.decay_steps (8) and warmup_steps (2) need at least as many steps",
        ),
        (
            "algorithm: {name: grpo, off_policy: {high: 2.0}}\n",
            "F:1: 'algorithm.off_policy.high' has no use with correction: none: leave it out, or choose truncate or ",
        ),
        (
            "algorithm:\n  name: grpo\n  off_policy:\n    ratio_to: proximal\n    level: sequence\n",
            "F:5: 'algorithm.off_policy.level' has no use with correction: none",
        ),
        (
            "algorithm: {name: rloo, off_policy: {correction: truncate, low: 0.9}}\n",
            "F:1: 'algorithm.off_policy.low' has no use with correction: truncate: leave it out, or choose mask",
        ),
        ("algorithm: {name: grpo, kl: {estimator: k2}}\n", "F:1: 'algorithm.kl.estimator' has no use with coef: 0"),
        (
            "algorithm: {name: ppo, critic: {}, kl: {placement: reward}}\n",
            "F:1: 'algorithm.kl.placement' has no use with coef: 0, without a KL term",
        ),
        (
            "algorithm: {name: dapo, max_replaced: 0.3}\nbatch: {prompts_per_step: 3}\n",
            "F:1: 'algorithm.max_replaced' is 0.3, of batch.prompts_per_step 3 less than one group: none would be",
        ),
        (
            "algorithm: {name: grpo, max_replaced: 5}\n",
            "F:1: 'algorithm.max_replaced' has no use without dynamic_sampling: leave it out",
        ),
        (
            "algorithm:\n  name: grpo\n  clip_high: 0.3\n  off_policy: {ratio_to: proximal, correction: truncate}\n",
            "F:3: 'algorithm.clip_high' has no use with off_policy.ratio_to: proximal and one update between "
            "publications, where the ratio is always 1: leave it out, or choose ratio_to: generator, or schedule.sync_",
        ),
        (
            "algorithm:\n  name: sapo\n  off_policy: {ratio_to: proximal}\n  gate_negative: 2\n",
            "F:4: 'algorithm.gate_negative' has no use with off_policy.ratio_to: proximal",
        ),
        (
            "algorithm:\n  name: grpo\n  off_policy: {ratio_to: proximal}\n  surrogate: kept_gradient\n",
            "F:4: 'algorithm.surrogate' has no use with off_policy.ratio_to: proximal",
        ),
        (
            "algorithm: {name: dapo, overlong: {margin_tokens: 128}}\n",
            "F:1: 'algorithm.overlong.margin_tokens' is 128, and sampling.max_tokens 128: every token of every answer "
            "would be penalised; expected a margin below sampling.max_tokens",
        ),
        (
            "algorithm:\n  name: grpo\n  overlong:\n    margin_tokens: 40\nsampling:\n  max_tokens: 39\n",
            "F:4: 'algorithm.overlong.margin_tokens' is 40, and sampling.max_tokens 39",
        ),
        ("sampling:\n  top_p: 1.0e-9\n", "F:2: 'sampling.top_p' is 1e-09, which leaves only the likeliest token"),
        (
            "algorithm:\n  name: grpo\n  off_policy: {correction: mask, low: 1, high: 1}\n",
            "F:3: 'algorithm.off_policy.low' is 1, as is high, and a mask keeps weights from low to high",
        ),
        (
            "algorithm: {name: grpo, mask_truncated: true}\nsampling: {max_tokens: 1}\n",
            "F:2: 'sampling.max_tokens' is 1, which every answer reaches: with algorithm.mask_truncated no answer with",
        ),
        (
            "algorithm: {name: dapo}\nsampling: {max_tokens: 1}\n",
            "F:2: 'sampling.max_tokens' is 1, which every answer reaches: with algorithm.overlong all are penalised",
        ),
        (
            "optimizer: {decay: cosine, min_lr_fraction: 1}\n",
            "F:1: 'optimizer.min_lr_fraction' is 1, with which decay: cosine changes nothing: set it lower, or leave",
        ),
        (
            "optimizer:\n  min_lr_fraction: 0\n",
            "F:2: 'optimizer.min_lr_fraction' has no use with decay: constant: leave it out, or choose linear",
        ),
        ("elasticity:\n  patience: 5\n", "F:2: 'elasticity.patience' has no use without elasticity: leave it out, or"),
        (
            "elasticity: {enabled: false, min_saving: 0.2}\n",
            "F:1: 'elasticity.min_saving' has no use without elasticity",
        ),
        (
            "evaluation:\n  samples: 0\n  temperature: 0.3\n",
            "F:3: 'evaluation.temperature' has no use with samples: 0, as greedy completions have none",
        ),
        (
            "weights: {backend: gloo, encoding: delta}\n",
            "F:1: 'weights.encoding' has no use with backend: gloo, where nothing is fetched",
        ),
        (
            "weights:\n  backend: ipc\n  anchor_every: 3\n",
            "F:3: 'weights.anchor_every' has no use with backend: ipc",
        ),
        ("weights:\n  chunk_mb: 0.0009\n", "F:2: 'weights.chunk_mb' is 0.0009, expected at least 0.001"),
        (
            "weights:\n  chunk_mb: 0.5\n  backend: nccl\n",
            "F:2: 'weights.chunk_mb' has no use with backend: nccl, where nothing is fetched: leave it out, or ",
        ),
        (
            "weights:\n  encoding: raw\n  anchor_every: 3\n",
            "F:3: 'weights.anchor_every' has no use with encoding: raw, without deltas: leave it out, or choose delta",
        ),
        (
            "ranker:\n  refit_every: 0\n  window: 200\n",
            "F:3: 'ranker.window' has no use with refit_every: 0 and no path, where nothing is predicted",
        ),
        (
            "ranker: {refit_every: 0}\ndispatch:\n  policy: skew-aware\n",
            "F:3: 'dispatch.policy' is skew-aware, which needs predicted lengths, with ranker.refit_every: 0 and",
        ),
        (
            "batch: {samples_per_prompt: 1}\nalgorithm: {name: reinforce_pp}\ndispatch:\n  policy: group-probe\n",
            "F:4: 'dispatch.policy' is group-probe, which learns from a prompt's other completions, with samples_per_",
        ),
        (
            "weights: {backend: gloo}\nschedule:\n  name: async\n  rolling: true\n",
            "F:4: 'schedule.rolling' has no use with weights.backend: gloo, of which all instances load together",
        ),
        (
            "recovery:\n  restarts: 0\n  pause_s: 30\n",
            "F:3: 'recovery.pause_s' has no use with restarts: 0: leave it out, or allow restarts",
        ),
        (
            "rewards:\n  attempts: 1\n  retry_pause_s: 30\n",
            "F:3: 'rewards.retry_pause_s' has no use with attempts: 1, after which nothing is tried again",
        ),
        (
            "rewards:\n  max_void_rate: null\n  void_window: 50\n",
            "F:3: 'rewards.void_window' has no use with max_void_rate: null, where nothing is judged",
        ),
        (
            "sampling: {max_tokens: 128}\nschedule:\n  name: stream\n"
            "  rounds: {kind: partial_rollouts, round_tokens: 128}\n",
            "F:4: 'schedule.rounds' could not carry anything over: 'schedule.rounds.round_tokens' is 128, and no",
        ),
        (
            "schedule: {name: sync, rounds: {kind: tail_batching, over_issue: 1}}\n",
            "F:1: 'schedule.rounds' could not carry anything over: 'schedule.rounds.over_issue' is 1: set it higher",
        ),
        ("sampling:\n  temperature: 0\n", "F:2: 'sampling.temperature' is 0, expected at least 0.01"),
        ("optimizer:\n  lr: yes\n", "F:2: 'optimizer.lr' is 'true', expected a number"),
        ("optimizer:\n  betas: [yes, 0.9]\n", "F:2: 'optimizer.betas.0' is 'true', expected a number"),
        ("optimizer:\n  betas: [0.9, 1.0]\n", "F:2: 'optimizer.betas.1' is 1.0, expected less than 1"),
        ("optimizer:\n  betas: [-0.1, 0.9]\n", "F:2: 'optimizer.betas.0' is -0.1, expected at least 0"),
        ("optimizer:\n  lr: .inf\n", "F:2: 'optimizer.lr' is inf, expected a finite number"),
        ("optimizer:\n  lr: 1e999\n", "F:2: 'optimizer.lr' is '1e999', expected a finite number"),
        ("evaluation:\n  threshold: .nan\n", "F:2: 'evaluation.threshold' is nan, expected a finite number"),
        ("algorithm:\n  name: grpo\n  clip_high: .inf\n", "F:3: 'algorithm.clip_high' is inf, expected a finite"),
        ("tasks:\n- {kind: agent, name: a, run: m:f, path: p, weight: .inf}\n", "F:2: 'tasks.0.weight' is inf, expe"),
        (
            "optimizer:\n  gradient_checkpointing: selectiv\n",
            "F:2: 'optimizer.gradient_checkpointing' is 'selectiv', expected true or false, or selective",
        ),
        (
            "model:\n  chat_template_kwargs:\n    a: [1, {dict: .nan}]\n",
            "F:3: 'model.chat_template_kwargs.a.1.dict' is nan, expected a finite number",
        ),
        (
            "model: {chat_template_kwargs: {a: 2024-01-02}}\n",
            "F:1: 'model.chat_template_kwargs.a' is datetime.date(2024, 1, 2), expected text (in quotes",
        ),
        (
            "model:\n  chat_template_kwargs: {true: 1}\n",
            "F:2: 'model.chat_template_kwargs.true': the name must be text (in quotes",
        ),
        ("steps: 3\ntrue: 2\n", "F:2: unknown key 'true'; allowed here: name, steps,"),
        ("optimizer:\n  null: 2\n", "F:2: unknown key 'optimizer.null'; allowed here: lr,"),
        ("steps: .inf\n", "F:1: 'steps' is inf, expected a finite number"),
        ("steps: off\n", "F:1: 'steps' is 'false', expected a whole number"),
        ("sampling:\n  temperature: 2.5\n", "F:2: 'sampling.temperature' is 2.5, expected at most 2"),
        (
            "sampling:\n  repetition_penalty: 1.1\n",
            "F:2: 'sampling.repetition_penalty' is not supported: the trainer could not recompute",
        ),
        ("model: {lora_rank: 8}\n", "F:1: 'model.lora_rank' is not supported: there are no adapters, all weights are"),
        ("tasks:\n- {kind: reasoning_gym, name: a}\n- {kind: reasoning_gym, name: a}\n", "F:1: tasks need different"),
        (
            "tasks:\n- {kind: file, name: a, path: a.jsonl, split: test}\n",
            "F:2: 'tasks.0': split (test) belongs to kind: hf_dataset: a file has no splits",
        ),
        (
            "deadlines: {reward_s: 5}\nevaluation:\n  tasks:\n"
            "  - {kind: file, name: a, path: a.jsonl, reward: python_tests, sandbox: {seconds: 5}}\n",
            "F: task 'a': sandbox.seconds (5) must be less than deadlines.reward_s (5): otherwise a program",
        ),
    ],
)
def test_a_mistake_in_a_run_file(write: Write, text: str, expected: str) -> None:
    errors = run_errors(write(text))
    assert len(errors) == 1
    assert errors[0].startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "F: the file is empty; a cluster file needs 'hardware' and 'sites'"),
        (
            "hardware: gpu\nsites:\n  a: {trainer: {}, generation: [{}]}\n",
            "F:1: 'hardware' is 'gpu', expected one of: ",
        ),
        (
            "sites:\n  a: {trainer: {}, generation: [{}]}\n",
            "F: key 'hardware' is missing: device type of the trainer and the instances; expected one of: cpu, cuda",
        ),
        ("hardware: cpu\nsites: {}\n", "F:2: 'sites' is {}, expected at least one entry"),
        ("hardware: cpu\nsites:\n  A b:\n    trainer: {}\n", "F:3: 'sites.A b': the name must match"),
        ("hardware: cpu\nsites:\n  a:\n    port: 1\n", "F:3: 'sites.a': a site needs a 'trainer'"),
        ("hardware: cpu\nsites:\n  a: {generation: [{}]}\n", "F:2: exactly one site must hold the 'trainer'"),
        (
            "hardware: cpu\nsites:\n  a:\n    trainer: {rank: 2}\n    generation: [{}]\n",
            "F:4: unknown key 'sites.a.trainer.rank'; did you mean 'ranks'?",
        ),
        (
            "hardware: cpu\nsites:\n  a:\n    trainer: {}\n    generation:\n    - {}\n    - max_batch: lots\n",
            "F:7: 'sites.a.generation.1.max_batch' is 'lots', expected a whole number",
        ),
        (
            "hardware: cpu\nsites:\n  a:\n    trainer: {sequence_parallel: true}\n    generation: [{}]\n",
            "F:4: 'sites.a.trainer.sequence_parallel' is 'true', expected a whole number",
        ),
        (
            "hardware: cpu\nsites:\n  a: {trainer: {}, generation: [{}]}\nabsence_s: .inf\n",
            "F:4: 'absence_s' is inf, expected a finite number",
        ),
        (
            "hardware: cpu\nsites:\n  home: {trainer: {}, port: 5600}\n  gpu: {generation: [{name: a100-spot}]}\n"
            "  gpu-a100: {generation: [{name: spot}]}\n",
            "F:2: sites.gpu.generation (a100-spot) and sites.gpu-a100.generation (spot) would both have an instance "
            "gpu-a100-spot-0: expected different names",
        ),
        (
            "hardware: cpu\nsites:\n  a:\n    launch:\n      address: head:1\n    trainer: {}\n    generation: [{}]\n",
            "F:5: 'sites.a.launch.address' has no use with backend: local, on this machine alone: leave it out, or set "
            "backend: ray",
        ),
    ],
)
def test_a_mistake_in_a_cluster_file(write: Write, text: str, expected: str) -> None:
    errors = cluster_errors(write(text))
    assert len(errors) == 1
    assert errors[0].startswith(expected)


def test_yes_and_no_are_what_they_say_where_they_are_among_the_values(write: Write) -> None:
    run = load_run(write("optimizer: {gradient_checkpointing: yes}\nevaluation: {at_start: no}\n"))
    assert run.optimizer.gradient_checkpointing is True and run.evaluation.at_start is False


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "local.yaml").write_text("x: 1")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for name, words in (
        ("locla.yaml", f"no such file; did you mean {tmp_path}/local.yaml?"),
        ("no/such.yaml", "no such file (and no folder"),
        ("", "this is a folder, expected a YAML file"),
        ("binary.yaml", "not UTF-8 text"),
    ):
        with pytest.raises(ConfigError, match=r"^\S+: ") as caught:
            load_cluster(tmp_path / name)
        assert words in str(caught.value)


def test_overrides_change_keys_entries_of_lists_and_whole_sections(write: Write) -> None:
    path = write("batch: {prompts_per_step: 3, samples_per_prompt: 5}\n")
    run = load_run(
        path,
        [
            "batch.prompts_per_step=7",
            "optimizer.lr=1e-5",
            "tasks.0.weight=2",
            "schedule={name: sync}",
            "model.system_prompt=null",
            "sampling.stop=['=', 'a.b']",
            "steps=4",
            "steps=9",
        ],
    )
    assert (run.batch.prompts_per_step, run.batch.samples_per_prompt) == (7, 5)
    assert run.optimizer.lr == 1e-5
    assert [task.weight for task in run.tasks] == [2, 1, 1]
    assert run.schedule.name == "sync"
    assert run.sampling.stop == ["=", "a.b"]
    assert run.steps == 9


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("steps", "expected key=value"),
        ("a..b=1", "expected key=value"),
        ("steps=[", "the value is not valid YAML"),
        (f"steps={'[' * 2000}", "nested too deeply"),
        (f"tasks.0.config.x={'[' * 97}{']' * 97}", "nested too deeply"),
        (f"tasks.0.config{'.x' * 2000}=1", "nested too deeply"),
        ("batch={epochs: 1, epochs: 2}", "key 'epochs' again, first on line 1"),
        ("steps=many", "'steps' is 'many', expected a whole number"),
        ("stps=3", "unknown key 'stps'; did you mean 'steps'?"),
        ("steps.x=3", "'steps' is 4, it has no key 'x'"),
        ("tasks.7.weight=1", "'tasks' has 3 entries, counted from 0: there is no 7"),
        ("tasks.a=1", "'tasks' is a list, expected a number from 0 to 2"),
        ("tasks.0.weight=-1", "'tasks.0.weight' is -1, expected more than 0"),
        ("model.max_context=64", "sampling.max_tokens (128) leaves no room"),
        ("optimizer.betas=[1, 2, 3]", "expected at most 2 entries"),
    ],
)
def test_a_mistake_in_an_override_names_the_override_and_not_the_file(write: Write, override: str, words: str) -> None:
    errors = run_errors(write("steps: 4\n"), override)
    assert len(errors) == 1
    assert errors[0].startswith(f"--set {override}: ")
    assert words in errors[0]


def test_a_file_has_as_many_levels_as_can_be_written_again(write: Write, tmp_path: Path) -> None:
    def nested(levels: int) -> Path:
        return write(f"tasks:\n- kind: reasoning_gym\n  name: a\n  config: {{x: {'[' * levels}{']' * levels}}}\n")

    cluster, run = load_cluster(ROOT / "cluster_configs/local.yaml"), load_run(nested(96))
    assert run == load_run(nested(1), [f"tasks.0.config.x={'[' * 96}{']' * 96}"])
    save_resolved(tmp_path / "run", cluster, run)
    assert load_resolved(tmp_path / "run") == (cluster, run)
    assert run_errors(nested(97)) == ["F: not valid YAML: nested too deeply"]


def test_mistakes_of_file_and_overrides_are_told_together(write: Write) -> None:
    errors = run_errors(write("steps: 0\n"), "seed=x", "optimizer.lr=0")
    assert sorted(errors) == [
        "--set optimizer.lr=0: 'optimizer.lr' is 0, expected more than 0.0",
        "--set seed=x: 'seed' is 'x', expected a whole number",
        "F:1: 'steps' is 0, expected at least 1 (see docs: E1001)",
    ]


def test_a_resolved_run_reads_back_the_same(tmp_path: Path) -> None:
    cluster = load_cluster(ROOT / "cluster_configs/local.yaml")
    run = load_run(ROOT / "examples/demo.yaml", ["model.system_prompt='é: yes'", "optimizer.eps=1e-12"])
    save_resolved(tmp_path / "new", cluster, run)
    assert load_resolved(tmp_path / "new") == (cluster, run)
    assert set(yaml.safe_load((tmp_path / "new/config.yaml").read_text())) == {"cluster", "run"}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["config.yaml"], "no partial file stays"


def test_a_trial_may_switch_off_what_the_file_describes(write: Write) -> None:
    file = write(
        "algorithm:\n  name: grpo\n  kl: {coef: 0.01, estimator: k2}\noptimizer: {decay: cosine, min_lr_fraction: 0}\n"
    )
    run = load_run(file, ["algorithm.kl.coef=0", "optimizer.decay=constant"])
    assert (run.algorithm.kl.coef, run.optimizer.decay) == (0, "constant")
    assert (
        "'algorithm.kl.estimator' has no use"
        in run_errors(write("algorithm: {name: grpo}"), "algorithm.kl.estimator=k2")[0]
    )


def test_keys_of_deltas_and_of_forecasts_have_a_use_where_there_are_some(write: Write) -> None:
    for encoding in ("auto", "delta"):
        assert (
            load_run(write(f"weights: {{encoding: {encoding}, anchor_every: 3, chunk_mb: 0.5}}")).weights.anchor_every
            == 3
        )
    assert load_run(write("weights: {encoding: raw, chunk_mb: 0.5}")).weights.chunk_mb == 0.5
    assert load_run(write("weights: {backend: gloo}")).weights.backend == "gloo"
    without = "ranker: {refit_every: 0}\ndispatch: {policy: "
    for policy in ("auto", "least-loaded", "round-robin", "group-probe"):
        assert load_run(write(f"{without}{policy}}}")).dispatch.policy == policy
    episodes = "tasks: [{kind: agent, name: a, run: m:f, path: p}]\n"
    assert load_run(write(f"{episodes}{without}skew-aware}}")).agent_tasks, "their turns are predicted"
    for told in ("refit_every: 0, path: ranker.lgb", "refit_every: 2"):
        assert load_run(write(f"ranker: {{{told}}}\ndispatch: {{policy: skew-aware}}")).dispatch.policy == "skew-aware"
        assert load_run(write(f"ranker: {{{told}, window: 200}}")).ranker.window == 200


def test_what_shapes_the_ratio_is_only_told_where_the_ratio_is_always_1(write: Write) -> None:
    proximal = "off_policy: {ratio_to: proximal, correction: truncate}"
    clipped = f"algorithm: {{name: grpo, clip_high: 0.3, {proximal}}}\n"
    assert "'algorithm.clip_high' has no use" in run_errors(write(clipped))[0]
    for more in ("schedule: {name: stream, sync_every: 2}", "batch: {epochs: 2}"):
        assert load_run(write(clipped + more)).algorithm.clip_high == 0.3
    assert load_run(write("algorithm: {name: grpo, clip_high: 0.3}")).algorithm.clip_high == 0.3
    file = write(clipped + "batch: {epochs: 2}\n")
    assert load_run(file, ["batch.epochs=1"]).algorithm.clip_high == 0.3
    for usual in ("dapo", "gspo", "cispo", "sapo"):
        assert load_run(write(f"algorithm: {{name: {usual}, {proximal}}}")).algorithm.name == usual
    # the ratio of a sequence has another gradient where a correction weighs its tokens
    for name, other in (("gspo", "clip"), ("grpo", "sequence_clip")):
        run = load_run(write(f"algorithm: {{name: {name}, surrogate: {other}, {proximal}}}"))
        assert run.algorithm.surrogate == other


def test_a_run_that_began_with_keys_without_use_goes_on(tmp_path: Path) -> None:
    algorithm = {"name": "grpo", "off_policy": {"high": 2.0}, "kl": {"estimator": "k2"}, "max_replaced": 5}
    algorithm |= {"overlong": {"margin_tokens": 4096}}
    options = {"min_lr_fraction": 0.5}
    schedule = {"name": "stream", "rounds": {"kind": "partial_rollouts", "round_tokens": 10**6}}
    run = RunConfig.model_validate(
        {"algorithm": algorithm, "optimizer": options, "schedule": schedule, "sampling": {"top_k": 1, "min_p": 1}}
        | {"weights": {"encoding": "raw", "anchor_every": 3}, "ranker": {"refit_every": 0, "window": 200}, "steps": 20},
    )
    site = {"launch": {"address": "head:6379"}, "trainer": {}, "generation": [{}]}
    cluster = ClusterConfig.model_validate({"hardware": "cpu", "sites": {"here": site}})
    save_resolved(tmp_path, cluster, run)
    assert load_resolved(tmp_path, ["steps=25"]) == (cluster, run.model_copy(update={"steps": 25}))
    copied = tmp_path / "run.yaml"
    copied.write_text(yaml.safe_dump(load_run(None).model_dump(mode="json")))
    assert load_run(copied) == RunConfig(), "a file with every key is a run file as well"
    cluster = load_cluster(ROOT / "cluster_configs/local.yaml")
    copied.write_text(yaml.safe_dump(cluster.model_dump(mode="json")))
    assert load_cluster(copied) == cluster
    for here in ({"launch": {"backend": "local", "address": "head:6379"}}, {"launch": {"backend": "local"}}):
        copied.write_text(yaml.safe_dump({"hardware": "cpu", "sites": {"here": site | here}}))
        assert not load_cluster(copied).sites["here"].on_ray


def test_a_folder_that_holds_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run's folder"):
        load_resolved(tmp_path)
    (tmp_path / "config.yaml").write_text("cluster: {}\n")
    with pytest.raises(ConfigError, match="'cluster' and 'run'"):
        load_resolved(tmp_path)


def test_a_resolved_run_that_cannot_be_read_is_named_once(tmp_path: Path) -> None:
    path = tmp_path / RESOLVED_NAME
    path.write_text("cluster: {}\n")
    with without_right_to(path), pytest.raises(ConfigError) as caught:
        load_resolved(tmp_path)
    assert str(caught.value) == f"{path}: cannot be read: Permission denied"
    path.write_bytes(b"cluster: \xff")
    with pytest.raises(ConfigError) as caught:
        load_resolved(tmp_path)
    assert str(caught.value) == f"{path}: not UTF-8 text (byte 9)"
    path.unlink()
    path.symlink_to(tmp_path / "other.yaml")
    with pytest.raises(ConfigError) as caught:
        load_resolved(tmp_path)
    assert str(caught.value).startswith(f"{path} is a symbolic link: ")


def test_a_mistake_in_merged_keys_is_told_with_the_line_where_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("batch: &shared\n  epochs: 0\nschedule:\n  <<: *shared\n  name: sync\n")
    with pytest.raises(ConfigError) as caught:
        load_run(path)
    told = str(caught.value).replace(str(path), "F").splitlines()
    assert {line.partition(",")[0].partition(";")[0] for line in told} == {
        "F:2: 'batch.epochs' is 0",
        "F:2: unknown key 'schedule.epochs'",
    }


def test_a_mistake_edited_into_a_resolved_run_is_told_with_its_line(tmp_path: Path) -> None:
    save_resolved(tmp_path, load_cluster(ROOT / "cluster_configs/local.yaml"), load_run(None))
    path = tmp_path / "config.yaml"
    lines = path.read_text().splitlines()
    wrong = next(i for i, line in enumerate(lines) if line.startswith("  steps:"))
    lines[wrong] = "  steps: none"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=rf"config.yaml:{wrong + 1}: 'steps' is 'none'"):
        load_resolved(tmp_path)


KEYS = st.sampled_from(["tasks", "schedule", "name", "kind", "batch", "steps", "reasoning_gym", "stream", "optimizer"])
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["stream", "reasoning_gym", "file", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.integers(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.dictionaries(KEYS, VALUES, max_size=4))
def test_no_file_however_wrong_gives_anything_but_a_readable_message(write: Write, data: dict[str, Any]) -> None:
    path = write(yaml.safe_dump(data))
    try:
        load_run(path)
    except ConfigError as error:
        assert all(line.startswith(f"{path}") for line in str(error).splitlines())


@settings(max_examples=100, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet="ab:- \n\t[]{}&*#|>'\"!%@1", max_size=40))
def test_no_text_however_broken_gives_anything_but_a_readable_message(write: Write, text: str) -> None:
    path = write(text)
    for load in (load_run, load_cluster):
        try:
            load(path)
        except ConfigError as error:
            assert str(error).startswith(f"{path}")


def test_two_policies_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two dispatch policies are named 'random'"):
        offer("random", "again", lambda _: LeastLoaded())


def test_every_dispatch_policy_can_be_chosen() -> None:
    assert set(get_args(DispatchConfig.model_fields["policy"].annotation)) == {*POLICIES, AUTO}
    description = DispatchConfig.model_fields["policy"].description or ""
    assert all(f"{name}: {kind.summary}" in description for name, kind in POLICIES.items())
    assert set(DEFAULTS) < set(NAMES) and set(DEFAULTS.values()) <= set(POLICIES)


def test_every_schedule_can_be_chosen_and_has_the_keys_of_what_it_does() -> None:
    for name, kind in KINDS.items():
        run = RunConfig.model_validate({"schedule": {"name": name}})
        assert type(run.schedule) is SCHEDULES[name] and run.schedule.__doc__ == kind.summary
        assert pickle.loads(pickle.dumps(run)) == run
        made = make_schedule(name)
        assert (run.schedule.exclusive, run.schedule.max_staleness) == (made.exclusive, made.max_staleness)
        keys = set(SCHEDULES[name].model_fields) - {"name"}
        assert ("rounds" in keys) == (not kind.overlaps and not kind.exclusive)
        assert ("rolling" in keys) == kind.overlaps and ("max_staleness" in keys) == kind.continuous


def test_the_default_split_of_a_file_in_the_configuration_of_an_older_run_is_left_out() -> None:
    task = {"kind": "file", "name": "a", "path": "a.jsonl"}
    old, new = (FileTask.model_validate(task | more) for more in ({"split": "train"}, {}))
    assert old == new and old.split is None


def test_a_reward_may_be_tried_as_often_as_one_likes() -> None:
    def longest(**rewards: float) -> float:
        values = {"rewards": rewards, "deadlines": {"reward_s": 20}}
        return RunConfig.model_validate(values).longest_reward_s

    assert longest(attempts=1) == 20
    assert longest(attempts=4, retry_pause_s=1.5) == 4 * 20 + 1.5 + 3 + 6
    assert longest(attempts=1100, retry_pause_s=1.5, longest_pause_s=5) == 1100 * 20 + 1.5 + 3 + 1097 * 5


def test_the_configuration_that_a_resume_reads_is_on_disk(tmp_path: Path, disk: Disk) -> None:
    save_resolved(tmp_path, load_cluster(ROOT / "cluster_configs/local.yaml"), load_run(None))
    assert [what for what, _ in disk.events] == ["on disk", "renamed", "on disk"]
    assert disk.events[0][1].startswith(f".{RESOLVED_NAME}.")
