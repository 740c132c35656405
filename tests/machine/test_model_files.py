"""What `model.path` may be, and what is read from a model's folder."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from streamrl.errors import UserError
from streamrl.machine import model_files
from tests.mere_user import without_right_to
from tests.run_dir.conftest import disk as disk
from tests.tiny_model import CHAT_TEMPLATE, save_tiny_model

NAME = "smollm2-135m"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STREAMRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_folder(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def test_a_complete_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "config.json", "model.safetensors", "tokenizer.json")
    assert model_files.resolve_model(str(folder)) == str(folder)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_an_incomplete_folder_says_what_is_missing(tmp_path: Path, missing: str) -> None:
    names = {"config.json", "model.safetensors", "tokenizer.json"} - {missing}
    folder = make_folder(tmp_path / "m", *names)
    with pytest.raises(UserError, match=missing.replace("model", "")):
        model_files.resolve_model(str(folder))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "config.json", "model-1.safetensors", "tokenizer.json")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"no model-2\.safetensors"):
        model_files.resolve_model(str(folder))


def test_the_tokenizer_with_the_chat_template_is_read_beside_one_of_mistral(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mistral"}))
    (folder / "tekken.json").write_text("{}")
    tokenizer = model_files.read_tokenizer(model_files.resolve_model(str(folder)))
    assert tokenizer.chat_template == CHAT_TEMPLATE
    tokenizer.save_pretrained(tmp_path / "checkpoint")
    assert (tmp_path / "checkpoint" / "tokenizer.json").exists()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"it has no tokenizer\.json \(tekken\.json alone is not read\)"):
        model_files.resolve_model(str(folder))


def test_all_parts_of_a_run_read_the_same_tokenizer_and_configuration() -> None:
    package = Path(model_files.__file__).parents[1]
    sources = {str(path.relative_to(package)): path.read_text() for path in package.rglob("*.py")}
    readers = {name for name, text in sources.items() if "AutoTokenizer.from_pretrained(" in text}
    assert readers == {"machine/model_files.py", "machine/gguf_conversion.py"}
    readers = {name for name, text in sources.items() if "AutoConfig.from_pretrained(" in text}
    assert readers == {"machine/model_files.py"}


def test_a_broken_config_is_told(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "config.json", "model.safetensors", "tokenizer.json")
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        model_files.resolve_model(str(folder))


@pytest.mark.parametrize("name", ["model.safetensors", "generation_config.json", "tokenizer.json"])
def test_a_file_that_this_user_may_not_read_is_told_before_a_run_depends_on_it(tmp_path: Path, name: str) -> None:
    files = ("config.json", "model.safetensors", "tokenizer.json", "generation_config.json")
    folder = make_folder(tmp_path / "m", *files)
    told = rf"no model folder in HF format: {name} cannot be read: Permission denied \(see"
    with without_right_to(folder / name), pytest.raises(UserError, match=told):
        model_files.resolve_model(str(folder))
    assert model_files.resolve_model(str(folder)) == str(folder)


@pytest.mark.parametrize("name", ["trainer_state.json", "notes.json"])
def test_a_file_that_nobody_reads_may_be_another_users(tmp_path: Path, name: str) -> None:
    folder = make_folder(tmp_path / "m", "config.json", "model.safetensors", "tokenizer.json", name)
    with without_right_to(folder / name):
        assert model_files.resolve_model(str(folder)) == str(folder)


@pytest.mark.parametrize("closed", ["model", "above"])
def test_a_folder_that_this_user_may_not_enter_is_told(tmp_path: Path, closed: str) -> None:
    folder = make_folder(tmp_path / "m", "config.json", "model.safetensors", "tokenizer.json")
    shut = {"model": folder, "above": tmp_path}[closed]
    told = rf"^model\.path: {folder}.*: cannot be read: Permission denied \(see docs: E1002\)$"
    with without_right_to(shut), pytest.raises(UserError, match=told):
        model_files.resolve_model(str(folder))


def test_a_typo_gets_the_nearest_names(tmp_path: Path) -> None:
    make_folder(tmp_path / "reasoner")
    with pytest.raises(UserError, match=f"did you mean {NAME}"):
        model_files.resolve_model("smollm2-135")
    with pytest.raises(UserError, match=f"did you mean {tmp_path}/reasoner"):
        model_files.resolve_model(str(tmp_path / "reasner"))


def test_a_known_model_that_was_not_fetched_names_the_command() -> None:
    with pytest.raises(UserError, match=f"run: streamrl fetch-model {NAME}"):
        model_files.resolve_model(NAME)


def test_a_hub_id_without_a_hub_names_the_model_that_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def offline(hub_id: str, **options: object) -> str:
        raise ConnectionError

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(UserError, match="streamrl fetch-model smollm2-135m"):
        model_files.resolve_model("HuggingFaceTB/SmolLM2-135M-Instruct")
    with pytest.raises(UserError, match="not in the local cache"):
        model_files.resolve_model("nobody/nothing")


def test_a_hub_id_without_the_hubs_package_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for read in (model_files.hub_config, model_files.resolve_model):
        with pytest.raises(UserError, match=r"nobody/nothing is a hub id, .*pip install huggingface_hub .*E1003"):
            read("nobody/nothing")


def test_a_hub_id_in_the_local_cache_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    folder = make_folder(tmp_path / "snapshot", "config.json", "model.safetensors", "tokenizer.json")

    def cached(hub_id: str, local_files_only: bool = False, **options: object) -> str:
        assert local_files_only, "asked the network for what the cache holds"
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached)
    assert model_files.resolve_model("owner/name") == str(folder)


def test_weights_that_are_there_twice_are_fetched_and_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    own = ["consolidated.safetensors", "consolidated.safetensors.index.json"]
    names = ["config.json", "model-1.safetensors", "model-2.safetensors", "tokenizer.json"]
    folder = tmp_path / "snapshot"

    def download(hub_id: str, local_files_only: bool = False, **patterns: Any) -> str:
        if local_files_only:
            raise FileNotFoundError
        make_folder(folder, *filter_repo_objects([*own, *names], **patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert model_files.resolve_model("owner/name") == str(folder)
    assert sorted(path.name for path in folder.iterdir()) == names
    make_folder(folder, "consolidated.safetensors")
    assert model_files.weight_bytes(folder) == 2 * len("{}")


def test_weights_have_a_digest_of_their_names_sizes_and_parts(tmp_path: Path) -> None:
    folder, size = tmp_path / "model", 40 * model_files.DIGEST_BYTES
    folder.mkdir()
    first, second = (folder / f"model-{number}.safetensors" for number in (1, 2))
    first.write_bytes(bytes(size))
    second.write_bytes(b"short")
    (folder / "config.json").write_text("{}")
    whole = model_files.weights_digest(folder)
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "config.json").unlink()
    assert model_files.weights_digest(tmp_path / "copy") == whole
    changed = set()
    for place in (0, size // 2, size - 1):
        content = bytearray(size)
        content[place] = 1
        first.write_bytes(content)
        changed.add(model_files.weights_digest(folder))
    first.write_bytes(bytes(size + 1))
    changed.add(model_files.weights_digest(folder))
    second.unlink()
    changed.add(model_files.weights_digest(folder))
    assert len(changed) == 5 and whole not in changed
