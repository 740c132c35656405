"""Whether the secret keys of a run's processes are anywhere but in their files."""

from __future__ import annotations

from pathlib import Path

import psutil

from streamrl.run_dir import layout
from streamrl.runtime.inside_keys import load_inside_keys
from streamrl.runtime.process_context import Addresses


def shown_secrets(run_dir: Path, site: str) -> list[str]:
    """Every process of this machine on whose command line or in whose environment one is, and every log with one."""
    public = Addresses.load(run_dir).inside_keys
    secrets = [load_inside_keys(run_dir, site, name, public).secret.decode() for name in public]
    assert len(set(secrets)) == len(public) > 4
    texts = {f"{one.pid}": f"{one.info['cmdline']} {one.info['environ']}" for one in psutil.process_iter(SHOWN)}
    texts |= {path.name: path.read_text(errors="replace") for path in (run_dir / layout.LOGS).iterdir()}
    return [name for name, text in texts.items() if any(secret in text for secret in secrets)]


SHOWN = ["cmdline", "environ"]
"""What `ps` shows to other users, or to the user's own processes."""
