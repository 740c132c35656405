"""The addresses of a run's processes in its folder."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from streamrl.errors import RunFailed
from streamrl.run_dir import layout
from streamrl.runtime.process_context import Addresses
from tests.run_dir.conftest import file_size_limit


def test_addresses_that_the_disk_has_no_room_for_are_named_and_the_old_ones_stay(tmp_path: Path) -> None:
    addresses = Addresses("tcp://one", "tcp://two", {"here": "tcp://three"})
    addresses.save(tmp_path)
    limit = "raise the limit on the size of a file (`ulimit -f`)"
    words = re.escape(
        f"cannot write {tmp_path / layout.ADDRESSES}: [Errno 27] File too large; {limit} (see docs: E1007)"
    )
    with file_size_limit(8), pytest.raises(RunFailed, match=f"^{words}$"):
        replace(addresses, publisher="tcp://four").save(tmp_path)
    assert Addresses.load(tmp_path) == addresses
    assert [path.name for path in tmp_path.iterdir()] == [layout.ADDRESSES]
