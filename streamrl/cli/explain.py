"""`streamrl explain`: prints what the documentation says about an error code."""

from __future__ import annotations

import posixpath
import re
import textwrap

import click

from streamrl.errors import ErrorCode, UserError

LINK = re.compile(r"\[([^\]]*)\]\(([^)]*)\)")
FENCED = re.compile(r"^```\w*\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
FOLDER = "docs/how-to"
"""Where the page is, from which its links lead."""
NAME_OF_MESSAGE = re.compile(r"^<!-- message: .* -->\n", re.MULTILINE)


@click.command()
@click.argument("code", required=False)
def command(code: str | None) -> None:
    """Print what an error code means and what to do; without CODE, list all codes.

    Messages contain the codes: `see docs: E1004`.

    \b
    Examples:
      streamrl explain E1004
      streamrl explain
    """
    from streamrl.scaffold.project_files import shipped

    entries = read_entries(shipped("troubleshoot.md").read_text(encoding="utf-8"))
    if code is None:
        for title in (text.partition("\n")[0] for text in entries.values()):
            click.echo(title)
    elif (entry := entries.get(code.upper())) is not None:
        click.echo(entry)
    else:
        raise UserError(f"{code}: no such code; expected one of {', '.join(ErrorCode)}")


def read_entries(page: str) -> dict[str, str]:
    """Split the page of errors into its entries by code, as plain text.

    Args:
        page: text of docs/how-to/troubleshoot.md, whose headings of entries begin with a code.
    """
    parts = re.split(r"^## (?=E\d+\. )", page, flags=re.MULTILINE)[1:]
    return {part.partition(".")[0]: _plain(part) for part in parts}


def _plain(entry: str) -> str:
    """Return an entry without marks that only a page needs: messages are set in, and links name the page."""
    entry = FENCED.sub(lambda found: textwrap.indent(found[1], "    "), NAME_OF_MESSAGE.sub("", entry))
    return LINK.sub(lambda found: f"{found[1]} ({_target(found[2])})", entry).strip()


def _target(link: str) -> str:
    return link if "://" in link else posixpath.normpath(posixpath.join(FOLDER, link))
