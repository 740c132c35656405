"""Errors of checks that come after the files were read, with the file and line of the key that they begin with."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from streamrl.config.cluster import ClusterConfig
from streamrl.config.load import Document, read_documents, told_where
from streamrl.config.mistakes import ConfigProblem, KeyPath
from streamrl.config.run import RunConfig
from streamrl.errors import UserError

KEY = re.compile(r"([a-z_]+(?:\.[A-Za-z0-9_-]+)*)(?: \(([a-z0-9_-]+)\)((?:\.[a-z_]+)*))?(?=:| is |,)")
"""The key with which a line of a message begins, such as `sites.here.generation (pool).max_batch`."""


@contextmanager
def naming_files(
    cluster: Path | None, run: Path | None, overrides: Sequence[str] = (), resumed: Path | None = None
) -> Iterator[None]:
    """Put file and line, or the override, before each line of a UserError that begins with a key of the files.

    Args:
        cluster: the cluster file; None: that of the run that is continued.
        run: the run file; None: there is none.
        overrides: of the run file's keys.
        resumed: folder of the run that is continued; None: a new run.
    """
    try:
        yield
    except UserError as error:
        try:
            of_cluster, of_run = read_documents(cluster, run, overrides, resumed)
        except UserError:  # changed meanwhile
            raise error from None
        lines = [_named(line, of_cluster, of_run) for line in str(error).split("\n")]
        raise UserError("\n".join(lines)) from error


def _named(line: str, cluster: Document | None, run: Document) -> str:
    if (found := KEY.match(line)) is None:
        return line
    top = found[1].split(".")[0]
    document = run if top in RunConfig.model_fields else cluster if top in ClusterConfig.model_fields else None
    if document is None:
        return line
    path: list[str | int] = [int(part) if part.isdecimal() else part for part in found[1].split(".")]
    if found[2] is not None:
        path = [*path, *_of_pool(document, path, found[2]), *filter(None, found[3].split("."))]
    return told_where(document, ConfigProblem(tuple(path), line))


def _of_pool(document: Document, path: Sequence[str | int], name: str) -> KeyPath:
    """Return the number of a pool in its site's list; (): it is not found there."""
    pools = document.data
    for part in path:
        pools = pools.get(part) if isinstance(pools, dict) else None
    named = enumerate(pools) if isinstance(pools, list) else ()
    default = "regular"
    return next(((n,) for n, one in named if isinstance(one, dict) and one.get("name", default) == name), ())
