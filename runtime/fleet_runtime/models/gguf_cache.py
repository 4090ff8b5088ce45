"""A user's GGUF file, converted once into the model cache.

    python -m fleet_runtime.models.gguf_cache FILE [--to DIR]

Called by `files` for --model file:///x.gguf. Safe when run twice at once and when killed, as `bundled`; nothing heavy is imported when
the folder is there.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fleet_contract.cache_folder import make_dir, open_to_all
from fleet_contract.names import ENV_MODELS
from fleet_runtime.errors import StartError
from fleet_runtime.models.bundled import cache_dir, locked

_CONVERTER: Final = b"1"  # change it when the converter's output changes: folders are then made anew
_PIECES: Final = 64
_PIECE_BYTES: Final = 64 << 10  # of each; the key is of so many pieces, evenly spread


def converted(source: Path, cache: Path | None = None) -> Path:
    """The model folder of a GGUF file, made if it is not there. Blocks on another process that makes the same.

    Args: cache: default `bundled.cache_dir()`. Raises StartError(ModelInvalid), OSError when the file cannot be read.
    """
    folder = (cache or cache_dir()) / "gguf" / f"{source.stem}-{_key(source)}"
    if folder.is_dir():
        return folder
    try:
        make_dir(folder.parent)
        with locked(folder.parent / f".{folder.name}.lock", lambda _line: None):
            if not folder.is_dir():
                _make(source, folder)
    except OSError as e:
        raise StartError(
            "ModelInvalid",
            f"{source} must be converted once, and {folder.parent} cannot be written: {e.strerror or e}; set {ENV_MODELS} to a folder that can, or "
            f"run `python -m fleet_runtime.models.gguf_cache {source} --to DIR` elsewhere and give the folder that it prints",
        ) from e
    return folder


def _make(source: Path, folder: Path) -> None:
    """Converts beside the target, then renames: a folder that is there is whole. The caller holds the lock."""
    from fleet_runtime.models.gguf_folder import GgufError, convert_gguf  # numpy, gguf, tokenizers: only when there is work

    for old in folder.parent.glob(f".{folder.name}.tmp-*"):  # of a run that was killed
        shutil.rmtree(old, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
    try:
        convert_gguf(source, work)
        open_to_all(work)
        work.rename(folder)
    except GgufError as e:
        raise StartError("ModelInvalid", str(e) if str(source) in str(e) else f"{source}: {e}") from e
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _key(source: Path) -> str:
    """Names the content, wherever it lies: size and pieces of it."""
    digest = hashlib.blake2b(_CONVERTER, digest_size=8)
    with source.open("rb") as f:
        size = os.fstat(f.fileno()).st_size
        digest.update(size.to_bytes(8, "little"))
        for i in range(_PIECES):
            digest.update(os.pread(f.fileno(), _PIECE_BYTES, max(0, size - _PIECE_BYTES) * i // (_PIECES - 1)))
    return digest.hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m fleet_runtime.models.gguf_cache`."""
    parser = argparse.ArgumentParser(prog="python -m fleet_runtime.models.gguf_cache", description="Convert a GGUF file into the model cache.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--to", type=Path, metavar="DIR", help=f"folder of models (default: ${ENV_MODELS}, else {cache_dir()})")
    args = parser.parse_args(argv)
    try:
        print(converted(args.file, args.to))
    except (StartError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
