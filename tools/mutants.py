"""Change the code of the pure cores in one place at a time, and see whether their tests notice: `make test-mutants`.

    python tools/mutants.py [--most 120] [--seed 0] [--survivors] [MODULE ...]

cosmic-ray makes the mutants: another operator, comparison or number, a negated condition, a loop that never runs.
`DropStatement` adds one of our own, the statement left out. `mutant_run.py` runs each mutant against the tests of its
module in `TESTS`. A mutant that no test kills is a survivor: either a test is missing, or the change makes no
difference that matters, which `mutants_explained.toml` then says.

Left out are changes of annotations, docstrings, `frozen` and `slots`, which no computation depends on, and replacements
that fail at once on any input (`+` by `<<`), which would only raise the score. A module with more than `--most` mutants
is judged by a sample of them.

The summary is experiments/results/mutants.json and mutants.md. The exit code is 1 if a module's score is below LEAST,
if a survivor has no explanation, or if an explanation has no survivor (asked only of modules that were not sampled).
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mutant_run import ROOT, Job, Outcome, run_sources
from mutant_summary import Score, explanations, load, problems, write

LIBRARY = ROOT / "build" / "cosmic-ray"
"""cosmic-ray and what it needs, installed by `make test-mutants`; it comes after the environment's own packages."""
RESULTS = ROOT / "experiments" / "results"
SHORT = 10
"""Characters of a line that says too little alone."""
FLEET_TESTS = (
    "tests/scheduler/test_fleet.py",
    "tests/scheduler/test_least_loaded.py",
    "tests/scheduler/test_turn_placement.py",
)
BATCH_TESTS = (
    "tests/rollouts/test_train_groups.py",
    "tests/rollouts/test_micro_batch.py",
    "tests/rollouts/test_micro_batch_wire.py",
    "tests/rollouts/test_advantage.py",
    "tests/rollouts/test_row_parts.py",
)
PLAN_TESTS = (
    "tests/scheduler/test_partition_candidates.py",
    "tests/scheduler/test_partition.py",
    "tests/scheduler/test_dispatch_objective.py",
    "--deselect=tests/scheduler/test_partition.py::"
    "test_known_lengths_come_within_three_percent_of_the_best_partition[1024-16-256]",
    "--deselect=tests/scheduler/test_partition.py::"
    "test_expected_time_of_alike_uncertain_requests_is_that_of_drawing_them",
    "--deselect=tests/scheduler/test_dispatch_objective.py::"
    "test_ratios_of_resampled_batches_are_ours_over_least_loaded",
    "--deselect=tests/scheduler/test_dispatch_objective.py::test_a_slow_trainer_is_not_starved_by_longest_first",
    "--deselect=tests/scheduler/test_dispatch_objective.py::test_the_saving_is_of_what_the_schedule_waits_for",
)
"""Arguments that leave out tests of seconds."""
TESTS: dict[str, tuple[str, ...]] = {
    "streamrl/surrogates.py": ("tests/training/test_losses.py", "tests/config/test_algorithm.py"),
    "streamrl/training/losses.py": ("tests/training/test_losses.py",),
    "streamrl/training/learning_rate.py": ("tests/training/test_learning_rate.py",),
    "streamrl/training/corrections.py": ("tests/training/test_corrections.py",),
    "streamrl/training/advantages.py": ("tests/training/test_advantages.py",),
    "streamrl/training/truncation.py": ("tests/training/test_truncation.py",),
    "streamrl/training/packing.py": ("tests/training/test_packing_layout.py",),
    "streamrl/rollouts/advantage.py": ("tests/rollouts/test_advantage.py", "tests/rollouts/test_rollouts.py"),
    "streamrl/rollouts/rank_shares.py": ("tests/rollouts/test_rank_shares.py",),
    "streamrl/rollouts/train_groups.py": BATCH_TESTS,
    "streamrl/rollouts/micro_batch.py": BATCH_TESTS,
    "streamrl/rollouts/micro_batch_wire.py": BATCH_TESTS,
    "streamrl/rollouts/ledger.py": ("tests/rollouts/test_ledger.py", "tests/rollouts/test_ledger_machine.py"),
    "streamrl/transport/delivery.py": ("tests/transport/test_delivery.py", "tests/transport/test_delivery_machine.py"),
    "streamrl/weights/membership.py": ("tests/weights/test_membership.py",),
    "streamrl/weights/backends/shared_ring.py": ("tests/weights/test_shared_ring.py",),
    "streamrl/weights/chain.py": ("tests/weights/test_chain.py", "tests/weights/test_chain_machine.py"),
    "scheduler/cost/recalibration.py": ("tests/scheduler/test_recalibration.py",),
    "scheduler/dispatch/policy.py": FLEET_TESTS,
    "scheduler/dispatch/baselines.py": FLEET_TESTS,
    "scheduler/dispatch/registry.py": FLEET_TESTS,
    "scheduler/dispatch/planned.py": (
        "tests/scheduler/test_dispatch_by_hand.py",
        "tests/scheduler/test_fleet.py",
        "tests/scheduler/test_dispatch_policies.py",
        "--deselect=tests/scheduler/test_dispatch_policies.py::test_two_choices_keep_loads_far_more_level_than_one",
    ),
    "scheduler/dispatch/partition.py": PLAN_TESTS,
    "scheduler/dispatch/partition_candidates.py": PLAN_TESTS,
    "scheduler/dispatch/dispatch_objective.py": PLAN_TESTS,
    "scheduler/dispatch/slot_filling.py": ("tests/scheduler/test_large_plans.py",),
    "scheduler/dispatch/remaining_length.py": ("tests/scheduler/test_remaining_length.py",),
    "scheduler/dispatch/group_probe.py": (
        "tests/scheduler/test_group_probe.py",
        "tests/scheduler/test_turn_placement.py",
    ),
    "scheduler/dispatch/outcome_trust.py": ("tests/scheduler/test_outcome_trust.py",),
    "scheduler/dispatch/straggler.py": ("tests/scheduler/test_straggler.py",),
}
"""The modules whose mutants are made, and the tests that run against each: small files without processes.

They are arguments of pytest, so `--deselect=` takes out what is slow.
"""
REPLACED: dict[str, dict[str, tuple[str, ...]]] = {
    "ReplaceBinaryOperator": {
        "Add": ("Sub",),
        "Sub": ("Add",),
        "Mul": ("Div",),
        "Div": ("Mul",),
        "FloorDiv": ("Mul", "Div"),
        "Mod": ("FloorDiv",),
        "Pow": ("Mul",),
        "BitOr": ("BitAnd",),
        "BitAnd": ("BitOr",),
        "LShift": ("RShift",),
        "RShift": ("LShift",),
    },
    "ReplaceComparisonOperator": {
        "Eq": ("NotEq",),
        "NotEq": ("Eq",),
        "Lt": ("LtE", "GtE"),
        "LtE": ("Lt", "Gt"),
        "Gt": ("GtE", "LtE"),
        "GtE": ("Gt", "Lt"),
        "Is": ("IsNot",),
        "IsNot": ("Is",),
    },
    "ReplaceUnaryOperator": {"Delete": ("USub", "Not", "Invert")},
}
OTHERS = (
    "AddNot",
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "ReplaceBreakWithContinue",
    "ReplaceContinueWithBreak",
    "ExceptionReplacer",
    "NumberReplacer",
    "RemoveDecorator",
    "ZeroIterationForLoop",
)
"""Operators of cosmic-ray that are taken whole."""


@dataclass(frozen=True)
class Mutant:
    """One change of a module."""

    operator: str
    line: int
    was: str
    """The changed lines, without indentation."""
    becomes: str
    source: str = field(repr=False)
    """The whole changed module."""


def operators() -> dict[str, Any]:
    """Return the operators, by name."""
    from cosmic_ray.plugins import get_operator

    names = [f"{kind}_{a}_{b}" for kind, pairs in REPLACED.items() for a, others in pairs.items() for b in others]
    return {name: get_operator(f"core/{name}")() for name in (*names, *OTHERS)} | {"DropStatement": _drop_statement()}


def _drop_statement() -> Any:
    """Return an operator that replaces a call, an augmented assignment, or one to an attribute or item, by `pass`."""
    import parso.python.tree as tree
    from cosmic_ray.operators.operator import Operator

    class DropStatement(Operator):
        def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
            if node.type == "simple_stmt" and _has_effect(node.children[0].get_code().strip()):
                yield node.start_pos, node.end_pos

        def mutate(self, node: Any, index: int) -> Any:
            first = node.children[0]
            prefix = first.get_first_leaf().prefix
            node.children[0] = tree.Keyword("pass", first.start_pos, prefix)
            return node

        @classmethod
        def examples(cls) -> tuple[()]:
            return ()

    return DropStatement()


def _has_effect(statement: str) -> bool:
    """Return whether a statement changes something that exists already."""
    try:
        node = ast.parse(statement).body[0]
    except SyntaxError:
        return False
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    assigned = [part for target in targets for part in ast.walk(target)]
    return (
        isinstance(node, ast.AugAssign)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
        or any(isinstance(part, ast.Attribute | ast.Subscript) for part in assigned)
    )


def mutants_of(source: str) -> list[Mutant]:
    """Return all mutants of a source, each with another meaning."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code

    nodes, seen, found = list(ast_nodes(get_ast(source))), {meaning(source)}, []
    for name, operator in operators().items():
        count = sum(len(list(operator.mutation_positions(node))) for node in nodes)
        for occurrence in range(count):
            changed = mutate_code(source, operator, occurrence)
            key = meaning(changed) if changed is not None else None
            if key is not None and key not in seen:
                seen.add(key)
                found.append(Mutant(name, *difference(source, changed), changed))
    return sorted(found, key=lambda one: (one.line, one.operator, one.becomes))


def meaning(source: str) -> str | None:
    """Return the source without comments, annotations, docstrings, `frozen`, `slots`; None if it is not Python."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.keyword) and node.arg in ("frozen", "slots"):
            node.value = ast.Constant(None)
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(None)
    return ast.unparse(tree)


def difference(before: str, after: str) -> tuple[int, str, str]:
    """Return (line, what stood there, what stands there now) of the only place where two sources differ.

    A short line, such as `break`, is shown with the one before.
    """
    old, new = before.splitlines(), after.splitlines()
    first = next(at for at, (one, other) in enumerate(zip(old, new, strict=False)) if one != other)
    same = 0
    while old[len(old) - 1 - same] == new[len(new) - 1 - same] and min(len(old), len(new)) - same > first + 1:
        same += 1
    begin = first - (len(old[first].strip()) < SHORT and first > 0)
    changed = [" ".join(" ".join(lines[begin : len(lines) - same]).split()) for lines in (old, new)]
    return first + 1, changed[0], changed[1]


def score(path: str, most: int, seed: int, why: dict[tuple[str, str], str], earlier: Score | None = None) -> Score:
    """Run the mutants of one module; if an earlier score is given, those that survived then.

    The others of that score count as killed, so it must be of the same code, and tests must only have been added.
    """
    began = time.monotonic()
    source = (ROOT / path).read_text(encoding="utf-8")
    found = mutants_of(source)
    chosen = found
    if earlier is not None:
        survived = {(one["operator"], one["line"], one["becomes"]) for one in earlier.survivors}
        chosen = [one for one in found if (one.operator, one.line, one.becomes) in survived]
    elif len(found) > most:
        chosen = sorted(random.Random(f"{seed} {path}").sample(found, most), key=found.index)
    print(f"{path}: {len(chosen)} of {len(found)} mutants", flush=True)

    def show(number: int, outcome: Outcome) -> None:
        mutant = chosen[number]
        if outcome.verdict == "survived" and (mutant.was, mutant.becomes) not in why:
            print(f"  {path}:{mutant.line} {mutant.operator}\n    - {mutant.was}\n    + {mutant.becomes}", flush=True)

    outcomes = run_sources(Job(Path(path), TESTS[path], [mutant.source for mutant in chosen]), show)
    survivors = [
        {name: value for name, value in asdict(mutant).items() if name != "source"}
        | {"why": why.get((mutant.was, mutant.becomes), "")}
        for mutant, outcome in zip(chosen, outcomes, strict=True)
        if outcome.verdict == "survived"
    ]
    seconds = round(time.monotonic() - began, 1)
    by = Counter(outcome.verdict for outcome in outcomes if outcome.verdict != "survived")
    if earlier is not None:
        by.update(earlier.by)
        seconds += earlier.seconds
    result = Score(len(found), by.total() + len(survivors), by.total(), dict(by), seconds, survivors)
    print(
        f"{path}: {result.killed} of {result.mutants} killed ({result.share:.1%}), {dict(by)}, in {seconds:.0f} s",
        flush=True,
    )
    return result


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the mutants of the chosen modules and write the summary; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="path, or part of one (default: all)")
    parser.add_argument("--most", type=int, default=120, help="mutants of a module; more are sampled (default 120)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples (default 0)")
    parser.add_argument("--survivors", action="store_true", help="run only what survived in the last summary")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the summary (default experiments/results)")
    options = parser.parse_args(None if arguments is None else list(arguments))
    chosen = [path for path in TESTS if not options.modules or any(part in path for part in options.modules)]
    if not chosen:
        parser.error(f"no such module; there are {', '.join(TESTS)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("STREAMRL_TEST_SLOWNESS", "1")  # nothing here waits for anything
    sys.path.append(str(LIBRARY))
    if importlib.util.find_spec("cosmic_ray") is None:
        raise SystemExit(f"cosmic-ray is not in {LIBRARY}; `make test-mutants` installs it")
    kept, scores = explanations(), load(options.out / "mutants.json")
    scores = {path: one for path, one in scores.items() if path in TESTS}
    for path in chosen:
        earlier = scores.get(path) if options.survivors else None
        scores[path] = score(path, options.most, options.seed, kept.get(path, {}), earlier)
        write(options.out, scores, options.seed)
    wrong = problems({path: scores[path] for path in chosen}, kept)
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
