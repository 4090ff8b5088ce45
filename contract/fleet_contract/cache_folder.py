"""Where on this machine everything that can be made again is kept: built binaries and libraries, converted models, the peers of the benchmarks."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The user's folder of the product: below XDG_CACHE_HOME, else ~/.cache. It need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "radixfleet"


def make_dir(path: Path) -> None:
    """Creates missing parents as 0755 whatever the umask: pods read what is kept as another user."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for p in missing:
        p.chmod(0o755)


def open_to_all(folder: Path) -> None:
    """Lets other users read a folder and all that is in it, whatever the umask was."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
