"""From a model URI to its files: where the folder is, whether it is whole, and the revision that names its content.

Called by the supervisor before any child starts, and by http and detokenizer for the text files. No torch.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from fleet_contract.launch import RuntimeLaunch
from fleet_contract.names import BUNDLED_MODELS_DIR, ENV_MODELS
from fleet_runtime.errors import StartError
from fleet_runtime.models.bundled import BUNDLED_MODELS, cache_dir
from fleet_runtime.models.gguf_cache import converted
from fleet_runtime.models.safetensors_file import parse_object, read_header, tensors_of
from fleet_runtime.models.simulated_tokenizer import simulated_tokenizer_files
from fleet_text.prompt import TOKENIZER_FILES, read_folder

SIMULATED: Final = "simulated://"
_SCHEMES: Final = "bundled://NAME, file:///PATH, the path of a folder or a .gguf file, simulated://"
INDEX_FILE: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"
# Bytes of each tensor that go into the revision: so many pieces, evenly spread, of so many bytes. Smaller tensors go in whole.
_SAMPLES: Final = 8
_SAMPLE_BYTES: Final = 64


def executor_of(flags: RuntimeLaunch) -> str:
    """`--executor`, where `auto` for simulated:// is simulated. Raises StartError(BadFlag) for an executor that does not go with the model."""
    simulated = flags.model.startswith(SIMULATED)
    name = "simulated" if flags.executor == "auto" and simulated else flags.executor
    if (name == "simulated") != simulated:
        raise StartError(
            "BadFlag",
            f"--executor is {flags.executor!r} and --model is {flags.model!r}: the simulated executor goes with simulated:// and only with it",
        )
    return name


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model that was found and is whole."""

    folder: Path | None  # None: simulated
    base_name: str  # what the API calls it when no served name is given
    revision: str  # 16 hex; the same for the same content, wherever it lies


def resolve_model(uri: str, *, models_dir: Path | None = None) -> ModelFiles:
    """Finds a model, checks that its files are whole, computes its revision. Reads a few kB per tensor, not the weights.

    Args: models_dir: where bundled:// models lie; default: $RADIXFLEET_MODELS, else the image's folder, else the user's cache.
    Raises StartError(ModelNotFound | ModelInvalid).
    """
    if uri.startswith(SIMULATED):
        name = uri.removeprefix(SIMULATED).strip("/") or "simulated"
        return ModelFiles(folder=None, base_name=name, revision=_simulated_revision(name))
    folder = found = _find_bundled(uri.removeprefix("bundled://"), models_dir) if uri.startswith("bundled://") else _find_folder(uri)
    try:
        if found.suffix == ".gguf" and found.is_file():
            folder = converted(found, models_dir)
            return ModelFiles(folder=folder, base_name=found.stem, revision=_check_folder(folder))
        return ModelFiles(folder=folder, base_name=folder.name, revision=_check_folder(folder))
    except OSError as e:
        raise StartError(
            "ModelInvalid",
            f"model {uri!r}: cannot read {e.filename or folder}: {e.strerror or e}; it must be readable by user id {os.getuid()}",
        ) from e


def load_text_files(model: ModelFiles) -> dict[str, bytes]:
    """Tokenizer, template and generation config of a model, by file name: what fleet_text.PromptEncoder takes."""
    return simulated_tokenizer_files() if model.folder is None else read_folder(model.folder)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, in order of their names. Raises StartError(ModelInvalid), OSError."""
    if mapped := weight_map(folder):
        names = sorted(set(mapped.values()))
        if missing := [n for n in names if Path(n).name != n or not (folder / n).is_file()]:
            raise StartError(
                "ModelInvalid", f"{folder}: {INDEX_FILE} names {', '.join(missing)}, not there: the model was copied in part; copy it again"
            )
        return [folder / n for n in names]
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf", ".safetensors"))
    found = f"it has {', '.join(others[:5])}" if others else "it has no weights at all"
    raise StartError("ModelInvalid", f"{folder}: no {_SINGLE} and no {INDEX_FILE}; {found}. Weights must be safetensors in the Hugging Face layout")


def weight_map(folder: Path) -> dict[str, str]:
    """Which file the index names for each tensor; {} where there is no index. Raises StartError(ModelInvalid), OSError."""
    if not (folder / INDEX_FILE).is_file():
        return {}
    found = _read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(v, str) for v in found.values()):
        raise StartError("ModelInvalid", f"{folder / INDEX_FILE}: weight_map is not a map of tensor names to files")
    return found


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder. Raises StartError(ModelInvalid), OSError."""
    return _read_json(folder / "config.json")


def _find_bundled(name: str, models_dir: Path | None) -> Path:
    if models_dir is not None:
        places = [models_dir]
    elif env := os.environ.get(ENV_MODELS):
        places = [Path(env)]
    else:
        places = [Path(BUNDLED_MODELS_DIR), cache_dir()]
    if not name or "/" in name or name.startswith("."):
        raise StartError("ModelNotFound", f"bundled://{name} is no name of a bundled model; there is {', '.join(BUNDLED_MODELS)}")
    for place in places:
        if (place / name).is_dir():
            return place / name
    looked = " and ".join(str(p) for p in places)
    hint = f"make it with: python -m fleet_runtime.models.bundled {name}" if name in BUNDLED_MODELS else f"there is {', '.join(BUNDLED_MODELS)}"
    raise StartError("ModelNotFound", f"bundled://{name}: no folder {name} in {looked}; {hint}")


def _find_folder(uri: str) -> Path:
    path = uri
    if "://" in uri:
        scheme, _, path = uri.partition("://")
        if scheme != "file":
            raise StartError("ModelInvalid", f"model {uri!r}: {scheme}:// is not supported; allowed: {_SCHEMES}")
        if not path.startswith("/"):
            raise StartError("ModelInvalid", f"model {uri!r}: a file URI has three slashes and an absolute path: file:///PATH")
    if not path:
        raise StartError("ModelInvalid", f"model is empty; allowed: {_SCHEMES}")
    folder = Path(os.path.abspath(path))
    if not folder.exists():
        raise StartError(
            "ModelNotFound", f"model {uri!r}: {folder} does not exist; give a folder that holds config.json, a .gguf file, or bundled://NAME"
        )
    if not folder.is_dir() and folder.suffix != ".gguf":
        raise StartError("ModelInvalid", f"model {uri!r}: {folder} is a file; give the folder that holds config.json, or a .gguf file")
    return folder


def _simulated_revision(name: str) -> str:
    digest = hashlib.blake2b(b"radixfleet simulated 1\0" + name.encode(), digest_size=8)
    for file, data in simulated_tokenizer_files().items():
        digest.update(file.encode() + b"\0" + data)
    return digest.hexdigest()


def _check_folder(folder: Path) -> str:
    """Checks that the files are there and whole; returns the revision."""
    if missing := [n for n in ("config.json", "tokenizer.json") if not (folder / n).is_file()]:
        raise StartError("ModelInvalid", f"{folder}: {' and '.join(missing)} missing; give a Hugging Face model folder with these files")
    digest = hashlib.blake2b(b"radixfleet model 1", digest_size=8)

    def add(*parts: bytes) -> None:
        for part in parts:  # the length first: no two lists of parts give the same stream
            digest.update(struct.pack("<Q", len(part)) + part)

    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            data = (folder / name).read_bytes()
            if name.endswith(".json"):
                parse_object(folder / name, data)
            add(name.encode(), data)
    for path in weight_files(folder):
        with path.open("rb") as f:
            header = read_header(path, f)
            add(path.name.encode(), struct.pack("<Q", os.fstat(f.fileno()).st_size), header)
            add(*_samples(path, f, header))
    return digest.hexdigest()


def _samples(path: Path, f: BinaryIO, header: bytes) -> Iterator[bytes]:
    """Pieces of each tensor, in order of the tensors' names."""
    for _, entry in sorted(tensors_of(path, header, os.fstat(f.fileno()).st_size).items()):
        start, size = entry.start, entry.end - entry.start
        if size <= _SAMPLES * _SAMPLE_BYTES:
            yield os.pread(f.fileno(), size, start)
            continue
        step = (size - _SAMPLE_BYTES) // (_SAMPLES - 1)
        for i in range(_SAMPLES):
            yield os.pread(f.fileno(), _SAMPLE_BYTES, start + i * step)


def _read_json(path: Path) -> dict[str, Any]:
    return parse_object(path, path.read_bytes())
