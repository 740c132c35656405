"""A model's files: the folder that `model.path` names, and what is read from such a folder."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from scheduler.cost.model_shapes import text_part
from streamrl.errors import ErrorCode, UserError, reaching, why_unusable
from streamrl.machine.known_models import CHECKSUMS, KNOWN_MODELS
from streamrl.machine.user_folders import cache_directory

HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"]
MISTRALS_OWN = "consolidated"
"""How files begin that hold the same weights again, in a form that transformers does not read."""
FILES_READ = (
    *("generation_config.json", "*.index.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer*"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template*", "preprocessor*.json", "processor*.json"),
)
"""What vLLM and transformers read beside config.json and weights; a folder may have other files, as of its training."""
WHOLE_FILE = "model.safetensors"
NOT_AS_STORED = ("quantization_config", "transformers_weights", "fusion_config")
"""Keys of config.json for which transformers converts weights, reads other files, or makes other modules."""
DIGEST_PARTS, DIGEST_BYTES = 17, 2**16
"""Parts of a file of weights that its digest is of, evenly spread, and the bytes of each."""
_cached_only = ContextVar("_cached_only", default=False)


def resolve_model(path: str, key: str = "model.path") -> str:
    """Return the folder, in HF format, of the model that `model.path` names.

    Args:
        path: the value of `model.path`.
        key: what messages call it.

    Raises:
        UserError: there is no usable model; the message says what is missing or what to do.
    """
    try:
        with reaching(key):
            return _resolved(path, key)
    except UserError as error:
        raise UserError(ErrorCode.MODEL.refer(str(error))) from error.__cause__


def _resolved(path: str, key: str) -> str:
    if path in KNOWN_MODELS:
        folder = cache_directory() / "models" / path
        if not os.path.exists(folder / CHECKSUMS):  # also where this user may not look
            raise UserError(f"{key}: {path} is not on this machine yet; run: streamrl fetch-model {path}")
        if wrong := _wrong_with(folder):
            raise UserError(f"{key}: {path} cannot be used: {'; '.join(wrong)}, in {folder}")
        return str(folder)
    folder = Path(path).expanduser()
    if folder.is_dir():
        if wrong := _wrong_with(folder):
            raise UserError(f"{key}: {path} is no model folder in HF format: {'; '.join(wrong)}")
        return str(folder)
    if on_hub(path):
        return _from_hub(path, key)
    near = difflib.get_close_matches(path, KNOWN_MODELS, n=1)
    if folder.parent.is_dir():
        siblings = [str(p) for p in folder.parent.iterdir() if p.is_dir()]
        near += difflib.get_close_matches(str(folder), siblings, n=2)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise UserError(
        f"{key}: {path} is neither a folder, nor a hub id (owner/name), nor one of: {', '.join(KNOWN_MODELS)}{hint}"
    )


@contextlib.contextmanager
def cached_models_only(only: bool = True) -> Iterator[None]:
    """Let no model be fetched inside: a hub id names what the hub's local cache has of it, and else nothing.

    Args:
        only: False changes nothing.
    """
    before = _cached_only.set(only or _cached_only.get())
    try:
        yield
    finally:
        _cached_only.reset(before)


def on_hub(path: str) -> bool:
    """Return whether a value of `model.path` is taken for a hub id."""
    folder = Path(path).expanduser()
    return bool(HUB_ID.match(path)) and not os.path.isdir(folder) and not os.path.isdir(folder.parent)


def hub_config(hub_id: str) -> Path | None:
    """Return the `config.json` of a model on the hub, from the local cache or fetched alone; None: neither has it.

    Raises:
        UserError: the package that reads the cache and asks the hub is not installed.
    """
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise UserError(_no_hub_package(hub_id)) from error
    try:
        with contextlib.suppress(Exception):
            return Path(hf_hub_download(hub_id, "config.json", local_files_only=True))
        return Path(hf_hub_download(hub_id, "config.json"))
    except Exception:
        return None


def _no_hub_package(hub_id: str) -> str:
    return ErrorCode.INSTALLATION.refer(
        f"{hub_id} is a hub id, for which the package huggingface_hub is needed; install it with: "
        "pip install huggingface_hub (it comes with 'streamrl[cpu]' and 'streamrl[gpu]', too)"
    )


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """Return one of a model folder's JSON files; empty if it cannot be read."""
    try:
        values = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # as of a model of the Hub whose files are not here yet
    return values if isinstance(values, dict) else {}


def token_rows(folder: Path) -> int | None:
    """Return how many tokens a model can read and write, those of padding included; None: its config does not say."""
    rows = text_part(read_config(folder)).get("vocab_size")
    return rows if isinstance(rows, int) else None


def read_tokenizer(folder: str | Path) -> Any:
    """Load the tokenizer of a model's folder as all parts of a run do, from its tokenizer.json.

    Raises:
        Exception: it cannot be read; the libraries raise whatever their authors chose.
    """
    from transformers import AutoTokenizer

    # beside a tekken.json, transformers would choose Mistral's own tokenizer, which takes no chat template; and beside
    # code of the model's own, it would ask whether to run that
    return AutoTokenizer.from_pretrained(folder, mistral_format=False, trust_remote_code=False)


def transformers_config(folder: str | Path) -> Any:
    """Return transformers' configuration of a model's folder, with the values that its config.json leaves out.

    Raises:
        OSError, ValueError: transformers cannot read it, for instance as only the model's own code can.
    """
    from transformers import AutoConfig

    with _in_words():
        # beside code of the model's own, it would ask on the terminal whether to run that
        try:
            return AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except ValueError as error:
            if "trust_remote_code" not in str(error):
                raise
            kind = read_config(Path(folder)).get("model_type")
            raise ValueError(
                f"its architecture ({kind}) is code that comes with the model (auto_map), which is never run here; "
                "expected a model of an architecture that transformers has"
            ) from error


@contextlib.contextmanager
def _in_words() -> Iterator[None]:
    """Make ValueErrors of all that transformers raises for values that it refuses, as its own kinds derive from none.

    An AttributeError comes from a name that torch lacks (`dtype`), for instance.
    """
    try:
        yield
    except (OSError, ValueError):
        raise
    except Exception as error:
        said = " ".join(str(error).split())  # on one line: the first alone of several does not say what is wrong
        raise ValueError(said or type(error).__name__) from error


def end_tokens(model: str, tokenizer: Any) -> list[int]:
    """Return the end-of-turn ids of the tokenizer and of the model's generation config, or else of its config.

    Raises:
        OSError, ValueError: transformers cannot read these, for instance as only the model's own code can.
    """
    from transformers import GenerationConfig

    configured = None
    if Path(model).joinpath("generation_config.json").exists():
        with _in_words():
            configured = GenerationConfig.from_pretrained(model).eos_token_id
    elif Path(model).joinpath("config.json").exists():  # as vLLM
        configured = GenerationConfig.from_model_config(transformers_config(model)).eos_token_id
    ids = {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])}
    return sorted(i for i in ids if i is not None)


def weight_bytes(folder: Path) -> int:
    """Return the size of a model folder's weights in bytes."""
    return sum(path.stat().st_size for path in _weight_files(folder))


def weights_digest(folder: Path) -> str:
    """Return a digest of a model folder's weights: of its files' names, sizes, and some parts of each, not of all."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(_weight_files(folder)):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for part in range(DIGEST_PARTS):  # the first one has the header
                file.seek(part * max(size - DIGEST_BYTES, 0) // (DIGEST_PARTS - 1))
                digest.update(file.read(DIGEST_BYTES))
    return digest.hexdigest()


class NotInSlices(Exception):
    """A model's weights cannot be read in slices; the text says why."""


def sliceable_files(folder: Path) -> list[Path]:
    """Return the safetensors files of which a rank of the trainer may read its slices alone (`sliced_loading.py`).

    Raises:
        NotInSlices: transformers reads other files of this folder, or does more than read them.
    """
    if (folder / "adapter_config.json").exists():
        raise NotInSlices("its folder has an adapter")
    config = read_config(folder)
    if special := [key for key in NOT_AS_STORED if config.get(key) is not None]:
        raise NotInSlices(f"its config.json has {special[0]}")
    if (folder / WHOLE_FILE).is_file():
        return [folder / WHOLE_FILE]
    index = read_config(folder, f"{WHOLE_FILE}.index.json").get("weight_map")
    if not isinstance(index, dict):
        raise NotInSlices(f"its folder has neither {WHOLE_FILE} nor an index of several")
    return [folder / name for name in sorted(set(index.values()))]


def in_slices(folder: Path) -> bool:
    """Return whether `sliceable_files` has files; the names in them may still be others than the model's."""
    try:
        return bool(sliceable_files(folder))
    except NotInSlices:
        return False


def _weight_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    read = [path for path in files if not path.name.startswith(MISTRALS_OWN)]
    return read or files or sorted(folder.glob("pytorch_model*.bin"))


def _wrong_with(folder: Path) -> list[str]:
    """List why a folder cannot be loaded: files missing, including those that a shard index names, or not readable."""
    wrong = []
    try:
        if not isinstance(json.loads((folder / "config.json").read_bytes()), dict):
            wrong.append("config.json holds no object")
    except FileNotFoundError:
        wrong.append("it has no config.json")
    except (OSError, ValueError) as error:
        wrong.append(f"config.json cannot be read ({getattr(error, 'strerror', None) or error})")
    for index in folder.glob("*.safetensors.index.json"):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            shards = set(json.loads(index.read_bytes()).get("weight_map", {}).values())
            wrong += [f"it has no {shard}" for shard in sorted(shards) if not (folder / shard).exists()]
    if not wrong and not _weight_files(folder):
        wrong.append("it has no *.safetensors")
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        tekken = " (tekken.json alone is not read)" if (folder / "tekken.json").exists() else ""
        wrong.append(f"it has no tokenizer.json{tekken}")
    return wrong + [text for path in _files_read(folder) if (text := _why_not_readable(path))]


def _files_read(folder: Path) -> list[Path]:
    """Return the files of a model's folder that are read later, but for its config.json."""
    return [*_weight_files(folder), *sorted({path for kind in FILES_READ for path in folder.glob(kind)})]


def _why_not_readable(path: Path) -> str:
    """Return why a file cannot be opened, which its mode alone does not say; '' if it can."""
    try:
        if os.path.isfile(path):
            path.open("rb").close()
    except OSError as error:
        return f"{path.name} {why_unusable(error)}"
    return ""


def _from_hub(hub_id: str, key: str) -> str:
    """Return the folder in the hub's local cache, fetching it if needed, so that later processes need no network."""
    try:
        from huggingface_hub import snapshot_download

        kinds = {"allow_patterns": HUB_FILES, "ignore_patterns": [f"{MISTRALS_OWN}*"]}
        with contextlib.suppress(Exception):  # not, or only partly, in the cache
            folder = Path(snapshot_download(hub_id, local_files_only=True, **kinds))
            if not _wrong_with(folder):
                return str(folder)
        if _cached_only.get():
            raise UserError(f"{key}: {hub_id} is not in the local cache, and nothing is downloaded for a plan")
        folder = Path(snapshot_download(hub_id, **kinds))
    except ImportError as error:
        raise UserError(f"{key}: {_no_hub_package(hub_id)}") from error
    except UserError:
        raise
    except Exception as error:
        known = next((name for name, model in KNOWN_MODELS.items() if model.hub_id == hub_id), None)
        hint = f"; the same model is there without a hub: streamrl fetch-model {known}" if known else ""
        raise UserError(
            f"{key}: {hub_id} is not in the local cache and the Hugging Face hub did not give it "
            f"({type(error).__name__}){hint}"
        ) from error
    if wrong := _wrong_with(folder):
        raise UserError(f"{key}: {hub_id} is no model in HF format: {'; '.join(wrong)}")
    return str(folder)
