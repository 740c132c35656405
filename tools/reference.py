"""Write docs/reference/ from the code: the cluster file, the run file, the command line, metrics, files, messages.

    .venv/bin/python tools/reference.py            # write the pages (make docs)
    .venv/bin/python tools/reference.py --check    # exit with 1 if a page differs from what would be written

Descriptions come from where the code has them: pydantic fields, click options, docstrings, and the string below a
constant. Nothing is written by hand here but the head of each page.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click
from pydantic import BaseModel
from reference_config import ConfigPage
from reference_metrics import prometheus_metrics, tracker_names
from reference_types import anchor, bounds, filled, is_model, members, table, text_of, type_text
from written_files import write_files

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "reference"
WRITTEN = "<!-- Written by tools/reference.py (`make docs`): change the code, not this page. -->"


def page(title: str, about: str, lines: Iterable[str]) -> str:
    """Return a whole page; runs of blank lines become one."""
    text = "\n".join([WRITTEN, "", f"# {title}", "", filled(about), "", *lines])
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def cluster_file() -> str:
    """Return docs/reference/cluster_file.md."""
    from streamrl.config.cluster import ClusterConfig

    about = """
    Where things run. [cluster_configs/local.yaml](../../cluster_configs/local.yaml) and its neighbours are commented
    examples; how to write one is in [sites](../how-to/sites.md) and [cluster](../how-to/cluster.md). Unknown keys are
    errors. `streamrl schema cluster` prints the same as JSON Schema, with which an editor completes and checks.
    """
    return page("Cluster file", about, ConfigPage(ClusterConfig).sections())


def run_file() -> str:
    """Return docs/reference/run_file.md."""
    from streamrl.config.run import RunConfig

    about = """
    What is trained, and how. Every section has a default, so an empty file is a valid run; unknown keys are errors.
    Combinations that make no sense are refused when the file is read, with the reason. `--set
    batch.prompts_per_step=4` changes a key, `--set tasks.0.weight=2` one of a list. `streamrl schema run` prints
    the same as JSON Schema, with which an editor completes and checks. Examples: [examples](../../examples/README.md).
    """
    return page("Run file", about, ConfigPage(RunConfig).sections())


def _help(text: str) -> Iterator[str]:
    r"""Yield a command's help; paragraphs that click must not wrap (\b) become code, but for their first line."""
    for part in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        lines = part.splitlines()
        if lines[0].strip() == "\b":
            yield from (lines[1].strip(), "", "```", *textwrap.dedent("\n".join(lines[2:])).splitlines(), "```", "")
        else:
            yield from (" ".join(part.split()), "")


def command_lines() -> Iterator[str]:
    """Yield a section for each command."""
    from streamrl.cli.main import COMMANDS, cli

    group = click.Context(cli, info_name="streamrl")
    yield from table(("command", ""), ((f"[`{name}`](#streamrl-{name})", text) for name, text in COMMANDS.items()))
    for name in COMMANDS:
        command = cli.get_command(group, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=group, max_content_width=100, terminal_width=100)
        yield from _command(context, f"streamrl {name}", "##")
        if not isinstance(command, click.Group):
            continue
        for part in command.list_commands(context):
            below = command.get_command(context, part)
            assert below is not None
            inner = click.Context(below, info_name=part, parent=context, max_content_width=100, terminal_width=100)
            yield from _command(inner, f"streamrl {name} {part}", "###")


def _command(context: click.Context, name: str, level: str) -> Iterator[str]:
    """Yield one command's usage, help and options."""
    command = context.command
    usage = " ".join(command.collect_usage_pieces(context))
    yield from (f"{level} {name}", "", "```", f"{name} {usage}", "```", "")
    yield from _help(command.help or "")
    records = [one.get_help_record(context) for one in command.params if isinstance(one, click.Option)]
    yield from table(("option", "meaning"), ((f"`{one[0]}`", one[1]) for one in records if one))


def cli_page() -> str:
    """Return docs/reference/cli.md."""
    about = """
    `streamrl COMMAND --help` prints the same. Exit codes: 0 done, 1 a run that failed, or an output whose reader
    has ended (`| head`), 2 bad input (nothing was started), 130 stopped by the user.
    """
    return page("Command line", about, command_lines())


def _link_to(model: type) -> str:
    """Return a link to the section of a model or dataclass on the same page, or to the page of metrics."""
    return f"[`{model.__name__}`]({'metrics.md' if model is _metrics_row() else ''}#{anchor(model.__name__)})"


def model_table(model: type[BaseModel]) -> list[str]:
    """Return a table of a model's fields with their types."""
    rows = (
        (f"`{key}`", type_text(info.annotation, _link_to) + bounds(info.metadata), info.description or "")
        for key, info in model.model_fields.items()
    )
    return table(("key", "type", "meaning"), rows)


def _records_below(annotation: Any) -> Iterator[type]:
    """Yield the models and dataclasses that an annotation names."""
    for one in members(annotation):
        if isinstance(one, type) and (is_model(one) or is_dataclass(one)):
            yield one
        for argument in get_args(one):
            yield from _records_below(argument)


def _with_models_below(record: type, level: int, seen: set[type]) -> Iterator[str]:
    """Yield the section of a model or dataclass, then those of the ones in its fields."""
    seen.add(record)
    if is_model(record):
        inner: Iterable[Any] = [info.annotation for info in record.model_fields.values()]
        lines = model_table(record)
    else:
        inner, lines = get_type_hints(record).values(), _record_table(record)
    yield from (f"{'#' * level} {record.__name__}", "", text_of(record), "", *lines)
    for annotation in inner:
        for one in _records_below(annotation):
            if one not in seen:
                yield from _with_models_below(one, level, seen)


def metrics() -> str:
    """Return docs/reference/metrics.md."""
    from streamrl.run_dir.evaluations import EvaluationRow
    from streamrl.run_dir.metrics import MetricsRow

    about = """
    `metrics.jsonl` in a run's folder has one JSON object for each optimizer step, `evaluations.jsonl` one for each
    evaluation. Both only grow; a resumed run first removes the rows behind its checkpoint. `null` means that there
    is no figure. `streamrl report` plots them; [evaluate](../how-to/evaluate.md) explains the evaluations and the
    length audit.
    """
    lines = [*tracker_names(), *prometheus_metrics(), "## metrics.jsonl", ""]
    seen: set[type] = set()
    lines += [*_with_models_below(MetricsRow, 3, seen), "## evaluations.jsonl", ""]
    return page("Metrics", about, [*lines, *_with_models_below(EvaluationRow, 3, seen)])


def constants(path: Path) -> Iterator[tuple[str, str, str, str]]:
    """Yield (group, constant, value, meaning) of a module's text constants in their order.

    A group is the comment line above its first constant, and ends at a constant that is no text; a meaning is the
    string below a constant.
    """
    source = path.read_text(encoding="utf-8")
    lines, body = source.splitlines(), ast.parse(source).body
    group = ""
    for node, after in zip(body, [*body[1:], None], strict=True):
        above = lines[node.lineno - 2].strip() if node.lineno > 1 else ""
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(value))):
                group = above.removeprefix("# ") if above.startswith("# ") else group
                match after:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        yield group, name, value, " ".join(text.split())
                    case _:
                        yield group, name, value, ""
            case ast.Assign():
                group = ""


def run_folder() -> str:
    """Return docs/reference/run_folder.md."""
    from streamrl.config.load import RESOLVED_NAME
    from streamrl.rollouts.rollout_store import COLUMNS
    from streamrl.run_dir import instance_files, layout
    from streamrl.run_dir.site_status import SiteStatus
    from streamrl.run_dir.status import RunStatus

    about = """
    What a run leaves in `runs/<name>`, and which process writes it; with several sites each has its own
    `runs/<name>-<site>` ([sites](../how-to/sites.md#start-them)). Names are those of `streamrl/run_dir/layout.py`;
    checkpoints are described [below](#checkpoints). [architecture](../explanation/architecture.md#the-runs-folder)
    says how the files work together.
    """
    names = [("launcher", f"`{RESOLVED_NAME}`", "Cluster file and run file with every key.")]
    used = set()
    for group, name, value, meaning in constants(Path(inspect.getfile(layout))):
        if not meaning:
            used.add(name)
        names.append((group.removeprefix("written by "), f"`{value}`", meaning or FILES.get(name, "")))
    if unused := sorted(FILES.keys() - used):
        raise ValueError(
            f"FILES describes {', '.join(unused)}: expected constants of layout.py that are set to a text, one each in "
            "an assignment of its own, and have no string below them"
        )
    lines = [*_docstring(layout), "## Files and folders", ""]
    lines += table(("written by", "name", "content"), names)
    seen: set[type] = set()
    lines += ["## status.json", "", *_docstring(importlib.import_module("streamrl.run_dir.status"))]
    lines += list(_with_models_below(RunStatus, 3, seen | {_metrics_row()}))
    lines += ["## site.json", ""]
    lines += list(_docstring(importlib.import_module("streamrl.run_dir.site_status")))
    lines += list(_with_models_below(SiteStatus, 3, seen))
    lines += ["## instances.json and processes.json", "", *_docstring(instance_files)]
    for record in (instance_files.WantedInstance, instance_files.StartedProcess):
        lines += [f"### {record.__name__}", "", text_of(record), "", *_record_table(record)]
    lines += ["## Rollouts", "", "Columns of `rollouts/step_000001.parquet`; an episode has one row or more.", ""]
    columns = [(f"`{name}`", f"`{kind}`", text) for name, (kind, text) in COLUMNS.items()]
    lines += table(("column", "type", "content"), columns)
    return page("Run folder", about, [*lines, "## Checkpoints", "", filled(CHECKPOINTS)])


def _metrics_row() -> type[BaseModel]:
    from streamrl.run_dir.metrics import MetricsRow

    return MetricsRow


FILES = {
    "STATUS": "The run's state right now, replaced about twice a second.",
    "METRICS": "One row for each optimizer step: [metrics](metrics.md).",
    "EVALUATIONS": "One row for each evaluation: [metrics](metrics.md#evaluationsjsonl).",
    "TRACE": "Spans of every process in Perfetto's format; open it in https://ui.perfetto.dev.",
    "LEDGER": "SQLite: every sample, from issued to trained.",
    "CHECKPOINTS": "Folder: one folder for each checkpoint.",
    "SITE_STATUS": "State of a site that does not train.",
    "TOKEN_JOURNAL": "SQLite: tokens of the requests in flight, so that another instance can continue them.",
    "TURN_JOURNAL": "SQLite: finished turns of open episodes, so that an episode of an agent can be resumed.",
    "WANTED_INSTANCES": "Which instances should run now.",
    "ADDRESSES": "Where each process listens.",
    "PROCESSES": "Processes that were started, and how those that ended did.",
    "REPORT": "The report: plots, timeline, samples.",
    "START_STAGES": "Folder: what each process does before it is ready, one file per process, one line per stage.",
    "STACKS": "Folder: stacks of a process, written on request of `streamrl why-stuck`.",
    "LAUNCHER_LOG": "What the launcher of a run printed.",
    "WEIGHTS": "Folder of a service: the site's versions of the weights, where they do not fit into shared memory.",
}
"""Content of those files whose names say enough in the code."""

CHECKPOINTS = """
`checkpoints/step_<n>/` is the model after `n` optimizer steps, a folder in Hugging Face's format that
`AutoModelForCausalLM.from_pretrained` loads; `trainer_state/` in it is the optimizer's state in torch's distributed
format, `state.json` the position in the prompts, and `checksums.json` has the size and BLAKE3 of every file: a resume
compares those that it loads. A folder `checkpoints/lost_step_<n>` gives a checkpoint up
([E1009](../how-to/troubleshoot.md#e1009-a-run-is-resumed-that-cannot-be)). `checkpoints/best.json` names the one with
the best evaluation. Step 0 in it is the untrained model (`model.path`), which has no folder.
"""


def _record_table(record: type, name: Callable[[Any], str] = lambda one: _record_name(one)) -> list[str]:
    """Return a table of the fields of a dataclass or struct; the string below a field is its meaning."""
    hints = get_type_hints(record, include_extras=True)
    meanings = field_texts(record)
    rows = ((f"`{key}`", type_text(hint, name), meanings.get(key, "")) for key, hint in hints.items() if key[0] != "_")
    return table(("field", "type", "meaning"), rows)


def _record_name(one: type) -> str:
    return _link_to(one) if is_dataclass(one) else f"`{one.__name__}`"


def field_texts(record: type) -> dict[str, str]:
    """Return the strings below the fields of a class, those of its bases included."""
    found: dict[str, str] = {}
    for one in reversed(record.__mro__):
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(one))).body[0]
        except (OSError, TypeError):
            continue
        assert isinstance(body, ast.ClassDef)
        for node, after in zip(body.body, body.body[1:], strict=False):
            match node, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found


def structs_of(module: types.ModuleType) -> list[type]:
    """Return the message types that a module defines, in the order of its text."""
    try:
        import msgspec
    except ImportError:
        return []
    own = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, msgspec.Struct)]
    own = [one for one in own if one.__module__ == module.__name__ and not one.__name__.startswith("_")]
    return sorted(own, key=lambda one: inspect.getsourcelines(one)[1])


def struct_lines(struct: type) -> list[str]:
    """Return the section of a message type."""
    tag = getattr(getattr(struct, "__struct_config__", None), "tag", None)
    named = [f"`{tag}` on the wire.", ""] if isinstance(tag, str) else []
    return [
        f"### {struct.__name__}",
        "",
        text_of(struct),
        "",
        *named,
        *_record_table(struct, lambda one: f"`{one.__name__}`"),
    ]


def messages() -> str:
    """Return docs/reference/messages.md."""
    package = importlib.import_module("streamrl.protocol")
    about = """
    What the processes of a run say to each other: the message types of `streamrl/protocol/`, one module for each
    edge. How messages are framed, acknowledged and repeated is in
    [architecture](../explanation/architecture.md#rules-that-hold-everywhere).
    """
    lines = [*_docstring(package), ""]
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda one: one.name):
        module = importlib.import_module(f"streamrl.protocol.{info.name}")
        lines += [f"## {info.name}", "", *_docstring(module), ""]
        for struct in structs_of(module):
            lines += struct_lines(struct)
    return page("Messages", about, lines)


def _docstring(module: types.ModuleType) -> Iterator[str]:
    """Yield a module's docstring; indented parts (drawings, tables) become code."""
    for part in re.split(r"\n\s*\n", inspect.cleandoc(module.__doc__ or "")):
        if all(line.startswith("    ") for line in part.splitlines()):
            yield from ("```", *textwrap.dedent(part).splitlines(), "```", "")
        else:
            yield from (" ".join(part.split()), "")


WRITERS: dict[str, Callable[[], str]] = {
    "cluster_file.md": cluster_file,
    "run_file.md": run_file,
    "cli.md": cli_page,
    "metrics.md": metrics,
    "run_folder.md": run_folder,
    "messages.md": messages,
}
"""Page -> what makes its text."""


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or compare them with the code (`--check`)."""
    return write_files({PAGES / name: write() for name, write in WRITERS.items()}, "the code", arguments)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
