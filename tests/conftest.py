"""Common settings of all tests: no downloads from a hub and no telemetry, in subprocesses as well."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import logging
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

GIVEN = "STREAMRL_TEST_SLOWNESS" in os.environ  # before anything is imported that might measure it
"""Whether this session is given its slowness by another one, as xdist's workers are."""

if "PYTEST_XDIST_WORKER" in os.environ:
    atexit.register(os._exit, 0)  # the first one registered is called last: taking down what was imported takes seconds

# threads that wait for each other keep busy the cores of other tests; numpy reads it as it is imported, below
os.environ.setdefault("OMP_NUM_THREADS", "1")

from streamrl.imports import importing  # noqa: E402
from tests import warm  # noqa: E402
from tests.leaks import Leaks  # noqa: E402
from tests.waiting import FACTOR, scaled, slowness  # noqa: E402

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_worker_niceness", "0")  # at Ray's 15 they would wait for whatever other tests compute

# a loaded machine is no defect of the code, nor of how examples are drawn
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

TESTS = Path(__file__).parent
SLOW = (
    "end_to_end/test_ray.py",
    "end_to_end/test_recovery.py",
    "end_to_end/test_pushed_weights.py",
    "end_to_end/test_run.py",
    "end_to_end/test_schedules.py",
    "end_to_end/test_agents.py",
    "verify/test_verify_live.py",
    "end_to_end/test_sites.py",
    "test_orphans.py",
    "chaos/test_chaos_live.py",
    "generation/test_eight_bit_engine.py",
    "generation/test_engine.py",
    "generation/test_speculating_engine.py",
    "training/test_losses_against_trl.py",
    "generation/test_parallel_engine.py",
    "generation/test_calibration.py",
    "launcher/test_ray_autoscaling.py",
    "launcher/test_ray_placement.py",
    "security/test_rank_rendezvous.py",
    "test_warm.py",
    "training/test_trainer_ranks.py",
    "weights/test_sharded_ranks.py",
    "weights/test_broadcast.py",
    "weights/test_gloo.py",
    "weights/test_ipc.py",
    "weights/test_written_directly.py",
    "install/test_install_downloads.py",
    "test_stress.py",
    "ranker/test_ranking_quality.py",
    "environments/test_mcp_environment.py",
    "agents/test_workers.py",
    "agents/test_hard_ends.py",
    "emulation/test_network.py",
    "agents/test_agent_program.py",
    "agents/test_example_agents.py",
    "training/test_training_graph.py",
    "training/test_mixtures.py",
    "training/test_sequence_ranks.py",
    "training/test_sliced_ranks.py",
    "training/test_not_finite_ranks.py",
    "generation/test_few_rows_vllm.py",
    "generation/test_replay_vllm.py",
    "generation/test_sampling_vllm.py",
    "generation/test_replayed_experts.py",
    "generation/test_kv_cache_vllm.py",
    "generation/test_routing_vllm.py",
)
"""Files of tests marked `slow` (whole runs, vLLM, a Ray cluster, TRL, several processes that work, or large fits), in
the order in which they run.

Those that take longest come first: a worker of pytest-xdist (`--dist loadfile --no-loadscope-reorder`) that has
finished a file takes the next one, so all end at about the same time. A file's fixtures are made once.
"""
STARTED_WARM = ("agents/test_workers.py", "agents/test_hard_ends.py", "agents/test_example_agents.py")
"""Those of them whose many agent workers are forked with everything imported, which else takes most of their time."""
LONG = frozenset((TESTS / "long_tests.txt").read_text(encoding="utf-8").split())
"""Functions of the other files whose tests took long, as FILE::FUNCTION (`tools/long_tests.py`), marked `long`."""
TAKES_SLOW = {"slow": True, "not slow": False, "not slow and not long": False}
"""Whether slow files are taken, and others left out, by the expressions that the Makefile gives to `-m`."""
ELSEWHERE = (
    "dashboard/test_in_browser.py",
    "environments/test_real_environments.py",
    "exporter/test_monitoring_tools.py",
    "trackers/test_real_trackers.py",
)
"""Files that need programs or packages which the environment of the tests has not: collected only if they are named, as
`make test-browser`, `make test-environments` and `make test-trackers` do."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> Generator[None, object, object]:
    """Measure the machine's slowness once, before xdist's workers start; they inherit it by their environment.

    Then start the workers; those of all quick or of all slow tests are forked with the large libraries imported.
    """
    if FACTOR in os.environ and not GIVEN:
        raise pytest.UsageError("a conftest or what it imports scales a deadline before the number of workers is known")
    workers, is_worker = session.config.getoption("tx", None), hasattr(session.config, "workerinput")
    factor = slowness(len(workers or [0]))
    if (reporter := session.config.pluginmanager.get_plugin("terminalreporter")) is not None:
        reporter.write_line(f"deadlines of tests: {factor:g} x those of an idle machine")
    takes_slow = TAKES_SLOW.get(session.config.option.markexpr)
    if takes_slow is None or not workers or is_worker:
        return (yield)
    with warm.forked_workers(vllm=takes_slow):
        return (yield)


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin that finds left processes and the mark `slow`, and give the tests an empty cache.

    With the user's own they would pass or fail by the models that the machine happens to have, and by what earlier
    code measured on it.
    """
    if not hasattr(config, "workerinput"):  # xdist's workers inherit it
        os.environ["STREAMRL_CACHE"] = cache = tempfile.mkdtemp(prefix="streamrl-tests-cache-")
        config.add_cleanup(lambda: shutil.rmtree(cache, ignore_errors=True))
    config.pluginmanager.register(Leaks(), "leaks")
    config.addinivalue_line("markers", "long: takes long, but none of what slow ones need (tests/long_tests.txt)")
    config.addinivalue_line(
        "markers", "slow: needs vLLM, a whole run, Ray, TRL or several processes (given by file in tests/conftest.py)"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Keep the garbage collector from what collection imports: looking through it took a fifth of the tests' time."""
    with importing():
        if session.config.args_source is pytest.Config.ArgsSource.TESTPATHS:
            _import_share(session.config.option.markexpr)
        result = yield
    _let_loggers_propagate()
    return result


def _let_loggers_propagate() -> None:
    """Let torch's loggers pass on to `torch` what they log: pytest would attach its handlers to each, six times a test.

    It does so with every logger that does not propagate, of which torch has 56; one of them is enough to capture all.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True


def _import_share(mark: str) -> None:
    """Let a worker of xdist begin with its share of the files: pytest rewrites their assertions, and keeps that.

    All workers collect all files in the same order; in a new clone each would rewrite every file itself.
    """
    worker, count = os.environ.get("PYTEST_XDIST_WORKER", ""), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if not worker or mark not in TAKES_SLOW:
        return
    files = [file_of(path) for path in sorted(TESTS.rglob("test_*.py"))]
    chosen = [file for file in files if file not in ELSEWHERE and (file in SLOW) == TAKES_SLOW[mark]]
    for file in chosen[int(worker.removeprefix("gw")) :: count]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # pytest says it when it collects the file
            importlib.import_module(f"tests.{file.removesuffix('.py').replace('/', '.')}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files unimported that an expression of `TAKES_SLOW` deselects as a whole: every worker would import vLLM.

    pytest does not ask for files that are named on its command line.
    """
    if collection_path.is_relative_to(TESTS) and collection_path.relative_to(TESTS).as_posix() in ELSEWHERE:
        return True
    takes_slow = TAKES_SLOW.get(config.option.markexpr)
    if collection_path.suffix != ".py" or takes_slow is None:
        return None
    return True if (collection_path.relative_to(TESTS).as_posix() in SLOW) != takes_slow else None


@pytest.fixture(scope="module", autouse=True)
def _spawned_warm(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let vLLM's engines, trainer ranks and the like begin with everything imported, in files that start many."""
    file = file_of(request.path)
    if file not in SLOW:
        yield
        return
    with warm.multiprocessing_warm(), warm.subprocess_warm() if file in STARTED_WARM else contextlib.nullcontext():
        yield


@functools.cache
def file_of(path: Path) -> str:
    """Return the path of a file of tests relative to this folder; most files have many tests."""
    return path.relative_to(TESTS).as_posix()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Scale pytest-timeout's limits, mark the tests of `SLOW` and `LONG`, and put the former in their order."""
    order = {file: place for place, file in enumerate(SLOW)}
    general = float(config.getoption("timeout", None) or config.getini("timeout") or 0)
    for item in items:
        mark = item.get_closest_marker("timeout")
        seconds = float((*mark.args, mark.kwargs.get("timeout", general))[0]) if mark is not None else general
        if seconds:
            item.add_marker(pytest.mark.timeout(scaled(seconds)), append=False)
        if file_of(item.path) in order:
            item.add_marker(pytest.mark.slow)
        elif f"{file_of(item.path)}::{item.name.partition('[')[0]}" in LONG:
            item.add_marker(pytest.mark.long)
    items.sort(key=lambda item: order.get(file_of(item.path), len(order)))
