"""Imports without garbage collection."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from streamrl.imports import importing, without_torch
from tests.tiny_model import save_tiny_model
from tests.waiting import scaled


def test_no_garbage_is_collected_meanwhile_and_what_exists_by_then_is_never_looked_through() -> None:
    before = gc.get_freeze_count()
    with importing():
        made = [[] for _ in range(100_000)]
        assert not gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count() >= before + len(made)
    assert not any(one is made for one in gc.get_objects())


def test_garbage_is_collected_again_after_an_import_that_failed() -> None:
    with pytest.raises(ImportError), importing():
        import streamrl.no_such_module  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()


USES_A_TOKENIZER = """
import json, os, sys
from streamrl.imports import without_torch

with without_torch():
    from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
loaded, changed = "torch" in sys.modules, "TRANSFORMERS_NO_ADVISORY_WARNINGS" in os.environ
ids = tokenizer.apply_chat_template(json.loads(sys.argv[2]), add_generation_prompt=True, return_dict=False)
import torch
print(json.dumps([loaded, changed, ids, tokenizer.decode(ids), float(torch.ones(2).sum())]))
"""


def test_a_tokenizer_needs_no_torch_and_torch_can_be_imported_later(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    chat = [{"role": "user", "content": "What is 3 + 4?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    command = [sys.executable, "-c", USES_A_TOKENIZER, str(tmp_path), json.dumps(chat)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(100))
    assert done.returncode == 0, done.stderr
    assert "PyTorch" not in done.stderr
    assert json.loads(done.stdout) == [False, False, ids, tokenizer.decode(ids), 2.0]


def test_where_torch_is_imported_already_nothing_is_hidden() -> None:
    with without_torch():
        import torch as seen
    assert seen is torch
