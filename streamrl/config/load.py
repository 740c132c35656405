"""Loading of the cluster file and the run file; a mistake is reported with file, line, key, value and expectation.

One `ConfigError` holds all mistakes of a file, up to a number. Line numbers are those of the YAML node that pydantic
rejects, or of the mapping that lacks a key.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from streamrl.atomic_files import replace_text
from streamrl.config.cluster import ClusterConfig
from streamrl.config.mistakes import ConfigProblem, dotted, explain
from streamrl.config.run import RunConfig
from streamrl.config.unused_keys import unused_cluster_keys, unused_keys
from streamrl.errors import ErrorCode, UserError, why_unusable
from streamrl.plain_files import NotPlainFile, read_plain

RESOLVED_NAME = "config.yaml"
"""File name of the resolved configuration in a run's folder."""
LARGEST, MOST_BRACKETS = 1 << 20, 10_000
"""Most bytes (of a user's file: characters), and opening brackets; a hundred thousand keep YAML busy for seconds."""
MOST_VALUES = 20_000
"""Most keys and values of a user's file, lists and mappings included: YAML reads some ten thousand in a second. A
resolved configuration has more than the files that it was made from."""
DEEPEST = 100
"""Most levels of a file; Python recurses to check, show and write them."""
TOO_DEEP = "nested too deeply"
NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
BYTES_TAG = "tag:yaml.org,2002:binary"
"""Tag of bytes in base 64, which pydantic takes for the text or the number that they spell."""
ODD_NUMBER = re.compile(r"[-+]?0[0-9_]|.*:")
"""Numbers in base 60 and with a leading 0: YAML reads neither as the decimal number that it looks like."""
HALF = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which is no character."""

ModelType = TypeVar("ModelType", bound=BaseModel)


class ConfigError(UserError):
    """Mistakes in a file or an override; the message lists them all."""


@dataclass(frozen=True)
class Document:
    """A parsed YAML file: plain values, and their nodes (for line numbers)."""

    name: str
    data: Any
    node: yaml.Node | None
    overrides: tuple[tuple[tuple[str | int, ...], str], ...] = ()
    """Paths set on the command line, with the text of the override."""


def load_cluster(path: Path | str) -> ClusterConfig:
    """Read a cluster file, and make the folder of its keys an absolute path.

    Raises:
        ConfigError: the file cannot be read, is empty, or contains mistakes.
    """
    document = _read(Path(path))
    if document.data is None:
        raise ConfigError(f"{document.name}: the file is empty; a cluster file needs 'hardware' and 'sites'")
    cluster = _validate(ClusterConfig, document)
    if problems := list(unused_cluster_keys(cluster)):
        raise _error(document, problems)
    keys = str((Path(path).parent / cluster.security.keys).resolve())
    return cluster.model_copy(update={"security": cluster.security.model_copy(update={"keys": keys})})


def load_run(path: Path | str | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file and apply `key=value` overrides.

    Args:
        path: run file; None, like an empty file: all defaults.
        overrides: e.g. 'batch.prompts_per_step=4' or 'tasks.0.weight=2'; values are YAML.

    Raises:
        ConfigError: the file cannot be read, or it or the overrides contain mistakes.
    """
    document = _read_run(path, overrides)
    run = _validate(RunConfig, document)
    # a trial may switch off what the file describes
    switched = [tuple(path) for path, _ in document.overrides]
    problems = [
        one for one in unused_keys(run) if not any(key[: len(path)] == path for key in one.also for path in switched)
    ]
    if problems:
        raise _error(document, problems)
    return run


def load_plain(path: Path) -> Any:
    """Read a YAML file of another kind, whose keys the caller checks; None: it is empty.

    Raises:
        ConfigError: it cannot be read, is not valid YAML, or has a key twice, bytes, a number like 010, or no keys.
    """
    return _read(path).data


def save_resolved(run_dir: Path, cluster: ClusterConfig, run: RunConfig) -> None:
    """Write `<run_dir>/config.yaml` with every key of both files, atomically.

    Raises:
        UserError: the folder cannot be written, or the file would be more than can be read back.
    """
    text = _resolved_text(cluster, run)
    for problem in _unreadable(text):
        raise ConfigError(problem)
    target = run_dir / RESOLVED_NAME
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        replace_text(target, text, lasting=True)  # no resume does without it
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}") from error


def check_resolved(cluster: ClusterConfig, run: RunConfig) -> Iterator[str]:
    """Check that what `save_resolved` would write can be read back: it may be longer than both files."""
    yield from _unreadable(_resolved_text(cluster, run))


def load_resolved(run_dir: Path, overrides: Sequence[str] = ()) -> tuple[ClusterConfig, RunConfig]:
    """Read the configuration that `save_resolved` wrote, and apply overrides of the run's keys, as `load_run` does.

    Raises:
        ConfigError: there is no such file, or it was edited and it, or an override, contains mistakes.
    """
    cluster, run = _read_both(run_dir, overrides)
    return _validate(ClusterConfig, cluster), _validate(RunConfig, run)


def read_documents(
    cluster: Path | None, run: Path | None, overrides: Sequence[str] = (), resumed: Path | None = None
) -> tuple[Document | None, Document]:
    """Read a cluster file, if there is one, and a run file, or both of the run that is continued, without checks.

    Raises:
        ConfigError: one of them cannot be read.
    """
    own = None if cluster is None else _read(cluster)
    if resumed is None:
        return own, _read_run(run, overrides)
    kept, of_run = _read_both(resumed, overrides)
    return own or kept, of_run


def told_where(document: Document, problem: ConfigProblem) -> str:
    """Return a problem's text with the file and line of its key, or the override that caused it, before it."""
    return _located(document, problem)[1]


def read_resolved(run_dir: Path) -> str:
    """Return the text that `save_resolved` wrote, of a run that may be somebody else's.

    Raises:
        ConfigError: there is no such file, or it is no plain file with text.
    """
    path = Path(run_dir) / RESOLVED_NAME
    try:
        text = read_plain(path, largest=LARGEST).decode()
    except (FileNotFoundError, NotADirectoryError) as error:
        missing = f"{run_dir} is not a run's folder: it holds no {RESOLVED_NAME}"
        raise ConfigError(ErrorCode.RESUME.refer(missing)) from error
    except NotPlainFile as error:  # its text names the file
        raise ConfigError(str(error)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {why_unusable(error)}") from error
    _refuse_brackets(path, text)
    return text


def _resolved_text(cluster: ClusterConfig, run: RunConfig) -> str:
    return yaml.safe_dump({"cluster": _plain(cluster), "run": _plain(run)}, sort_keys=False, allow_unicode=True)


def _unreadable(resolved: str) -> Iterator[str]:
    """Yield why `read_resolved` would refuse this text."""
    counts = {"bytes": (len(resolved.encode()), LARGEST), "brackets": (_brackets(resolved), MOST_BRACKETS)}
    for what, (count, most) in counts.items():
        if count > most:
            yield (
                f"run file and cluster file: with every key written out they have {count:,} {what}, and at most "
                f"{most:,} can be read back from a run's {RESOLVED_NAME}: shorten the longest texts, such as "
                "model.system_prompt"
            )


def _brackets(text: str) -> int:
    return text.count("[") + text.count("{")


def _refuse_brackets(path: Path, text: str) -> None:
    if _brackets(text) > MOST_BRACKETS:
        raise ConfigError(f"{path}: more than {MOST_BRACKETS:,} brackets, which no configuration has")


def _read_run(path: Path | str | None, overrides: Sequence[str]) -> Document:
    document = _read(Path(path)) if path is not None else Document("(no run file)", None, None)
    if document.data is None:
        document = Document(document.name, {}, document.node)
    return _override(document, overrides)


def _read_both(run_dir: Path, overrides: Sequence[str]) -> tuple[Document, Document]:
    """Return the parts of the cluster file and of the run file in a run's resolved configuration."""
    path = Path(run_dir) / RESOLVED_NAME
    document = _parse(path, read_resolved(run_dir), levels=-1)  # both files are one level deeper here
    data = document.data
    if not isinstance(data, dict) or set(data) != {"cluster", "run"}:
        raise ConfigError(f"{path}: expected exactly the top-level keys 'cluster' and 'run'")

    def part(key: str) -> Document:
        return Document(document.name, data[key], _child(document.node, key))

    return part("cluster"), _override(part("run"), overrides)


def _plain(model: BaseModel) -> dict[str, Any]:
    return model.model_dump(mode="json")


def _read(path: Path) -> Document:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LARGEST + 1)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file{_near_files(path)}") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{path}: this is a folder, expected a YAML file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {why_unusable(error)}") from error
    if len(text) > LARGEST:
        raise ConfigError(f"{path}: more than {LARGEST:,} characters, which no configuration has")
    _refuse_brackets(path, text)
    return _parse(path, text, loader=_Counting)


class _TooMany(ValueError):
    """A text has more than `MOST_VALUES`."""


class _Loader(yaml.SafeLoader):
    """Reads a pair of escapes such as \\ud83d\\ude00 as one character: JSON writes those outside of 16 bits so."""

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        """Read the next scalar; half a pair without the other one stays as it is."""
        node = super().compose_scalar_node(anchor)
        if HALF.search(node.value):
            node.value = node.value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        return node

    def value(self, node: yaml.Node | None) -> Any:
        """Return what the node of a whole text stands for; None: the text is empty."""
        return None if node is None else self.construct_document(node)


class _Counting(_Loader):
    """Ends before it has read a text of too many keys and values."""

    _read = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Read the next key or value."""
        self._read += 1
        if self._read > MOST_VALUES:
            raise _TooMany(f"more than {MOST_VALUES:,} keys and values, which no configuration has")
        return super().compose_node(parent, index)


def _parse(path: Path, text: str, levels: int = 0, loader: type[_Loader] = _Loader) -> Document:
    try:
        parser = loader(text)
        node = parser.get_single_node()
        _refuse_misread(str(path), node, levels)
        data = parser.value(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{path}{line}: not valid YAML: {reason}") from error
    except _TooMany as error:
        raise ConfigError(f"{path}: {error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = TOO_DEEP if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise ConfigError(f"{path}: not valid YAML: {reason}") from error
    if data is not None and not isinstance(data, dict):
        raise ConfigError(f"{path}: expected keys with values ('key: value'), found {_kind(data)}")
    return Document(str(path), data, node)


def _near_files(path: Path) -> str:
    """Return the end of a message that suggests files with similar names."""
    folder = path.parent
    if not folder.is_dir():
        return f" (and no folder {folder})"
    names = [item.name for item in folder.iterdir() if item.suffix in (".yaml", ".yml")]
    close = difflib.get_close_matches(path.name, names, n=3)
    return f"; did you mean {', '.join(str(folder / name) for name in close)}?" if close else ""


def _refuse_misread(name: str, root: yaml.Node | None, levels: int) -> None:
    """Refuse what YAML parsers silently read as something else."""
    if problems := _misread(root, (), levels):
        raise ConfigError("\n".join(f"{name}:{line}: {text}" for line, text in problems))


def _misread(root: yaml.Node | None, path: Sequence[str | int], levels: int = 0) -> list[tuple[int, str]]:
    """Return the lines of keys that their mapping has before them already and of odd values, with what is wrong.

    Args:
        root: the text.
        path: where its value is in the file.
        levels: levels of the file above it, besides those of the path.

    Raises:
        ValueError: these and the text's are more than `DEEPEST`.
    """
    problems = []
    pending: list[tuple[yaml.Node | None, tuple[str | int, ...]]] = [(root, tuple(path))]
    seen = set()
    while pending:
        node, above = pending.pop()
        if node is None or id(node) in seen:  # an alias can lead back to its own anchor
            continue
        seen.add(id(node))
        if levels + len(above) >= DEEPEST:
            raise ValueError(TOO_DEEP)
        below: list[tuple[yaml.Node | None, tuple[str | int, ...]]] = []
        if isinstance(node, yaml.SequenceNode):
            below = [(value, (*above, i)) for i, value in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode):
            first: dict[str, int] = {}
            for key, _ in node.value:
                line = key.start_mark.line + 1
                if isinstance(key, yaml.ScalarNode):
                    if key.value in first:
                        problems.append((line, f"key '{key.value}' again, first on line {first[key.value]}"))
                    first.setdefault(key.value, line)
                    if odd := _odd_scalar(key):
                        problems.append((line, f"the key {odd}"))
            below = [
                (value, (*above, key.value if isinstance(key, yaml.ScalarNode) else "?")) for key, value in node.value
            ]
        elif isinstance(node, yaml.ScalarNode) and (odd := _odd_scalar(node)):
            of = f"'{dotted(above)}'" if above else "the file"
            problems.append((node.start_mark.line + 1, f"{of} is {odd}"))
        pending += reversed(below)  # the text's order, so that an anchor is met before its aliases
    return sorted((line, text.encode(errors="backslashreplace").decode()) for line, text in problems)


def _odd_scalar(node: yaml.ScalarNode) -> str:
    """Return what was written there, what YAML makes of it, and what to write instead; '': it is what it looks like.

    Odd are bytes, and numbers in base 60 (2:30 is 150) or with a leading 0 (010 is 8), as YAML 1.1 has them, and texts
    that UTF-8 cannot encode.
    """
    if half := HALF.search(node.value):
        return f"text with {half[0]}, one half of a surrogate pair: write the whole character, or both halves"
    if node.tag == BYTES_TAG:
        return "!!binary, which YAML reads as bytes: write it as text or a number, without a tag"
    if node.tag not in NUMBER_TAGS or not ODD_NUMBER.match(node.value):
        return ""
    try:
        read = f"which YAML reads as {yaml.constructor.SafeConstructor().construct_object(node)}"
    except (ValueError, OverflowError):  # 60 to the power of the number of colons, or no number despite its tag
        read = "which is no plain number"
    return f"{node.value}, {read}: write a number in plain decimals, without ':' or a leading 0, a text in quotes"


def _override(document: Document, overrides: Sequence[str]) -> Document:
    """Apply overrides to a document; raise a ConfigError that lists all invalid ones."""
    data: Any = document.data
    done: list[tuple[tuple[str | int, ...], str]] = []
    problems: list[str] = []
    for text in overrides:
        key, equals, raw = text.partition("=")
        try:
            if not (equals and key and all(part for part in key.split("."))):
                raise ValueError("expected key=value, e.g. batch.prompts_per_step=4")
            path: list[str | int] = [int(part) if part.isdecimal() else part for part in key.split(".")]
            value = _override_value(raw, path)
            if path[0] == "tasks" and len(path) > 1 and "tasks" not in data:
                data = {**data, "tasks": _plain(RunConfig())["tasks"]}
            data = _put(data, path, value)
            done.append((tuple(path), text))
        except ValueError as error:
            problems.append(f"--set {text}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    return Document(document.name, data, document.node, tuple(done))


def _override_value(raw: str, path: Sequence[str | int]) -> Any:
    """Return the value of an override of the key at `path`.

    Raises:
        ValueError: it is not valid YAML, is nested too deeply, a mapping in it has a key twice, or a value is odd.
    """
    try:
        parser = _Loader(raw)
        node = parser.get_single_node()
        problems = _misread(node, path)
        value = parser.value(node)
    except yaml.YAMLError as error:
        raise ValueError(f"the value is not valid YAML: {str(error).splitlines()[0]}") from error
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    if problems:
        raise ValueError("; ".join(text for _, text in problems))
    return value


def _put(data: Any, path: Sequence[str | int], value: Any, above: str = "") -> Any:
    """Return a copy of `data` with `value` at `path`; missing mappings are created, lists are not extended."""
    if not path:
        return value
    part, where = path[0], f"'{above}'" if above else "the run file"
    deeper = f"{above}.{part}" if above else str(part)
    if isinstance(data, list):
        if not isinstance(part, int):
            raise ValueError(f"{where} is a list, expected a number from 0 to {len(data) - 1} after it, got '{part}'")
        if part >= len(data):
            raise ValueError(f"{where} has {len(data)} entries, counted from 0: there is no {part}")
        return [_put(item, path[1:], value, deeper) if i == part else item for i, item in enumerate(data)]
    if data is not None and not isinstance(data, dict):
        raise ValueError(f"{where} is {_kind(data)}, it has no key '{part}'")
    copy = dict(data or {})
    copy[str(part)] = _put(copy.get(str(part)), path[1:], value, deeper)
    return copy


def _validate(model: type[ModelType], document: Document) -> ModelType:
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        raise _error(document, explain(model, error)) from error


def _error(document: Document, problems: Sequence[ConfigProblem]) -> ConfigError:
    """Return the error that tells of all problems, in the order of the file."""
    located = sorted((_located(document, problem) for problem in problems), key=lambda item: item[0])
    return ConfigError(ErrorCode.CONFIGURATION.refer("\n".join(text for _, text in located)))


def _located(document: Document, problem: ConfigProblem) -> tuple[int, str]:
    """Return a problem's line (for sorting) and message, located by the override that caused it or by file and line."""
    for path, text in reversed(document.overrides):
        if any(_overlap(path, about) for about in (problem.path, *problem.also)):
            return 0, f"--set {text}: {problem.text}"
    line = _line(document.node, problem.path)
    return line, f"{document.name}{f':{line}' if line else ''}: {problem.text}"


def _overlap(first: Sequence[str | int], second: Sequence[str | int]) -> bool:
    """Whether one path is a prefix of the other."""
    shared = min(len(first), len(second))
    return shared > 0 and [str(part) for part in first[:shared]] == [str(part) for part in second[:shared]]


def _line(node: yaml.Node | None, path: Sequence[str | int]) -> int:
    """Return the line of the deepest node on `path` that the file contains (0: none)."""
    line = 0
    for part in path:
        if isinstance(node, yaml.MappingNode):
            found = [(key, value) for key, value in node.value if key.value == str(part)]
            if not found:
                break
            key, node = found[-1]
            line = key.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return line


def _child(node: yaml.Node | None, key: str) -> yaml.Node | None:
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return next((value for name, value in pairs if name.value == key), None)


def _kind(value: Any) -> str:
    kinds: dict[type, str] = {list: "a list", dict: "a mapping", str: "text"}
    return kinds.get(type(value), repr(value))
