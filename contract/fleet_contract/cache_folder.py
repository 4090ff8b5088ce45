"""Where on this machine everything that can be made again is kept: built binaries and libraries, converted models, the peers of the benchmarks."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The user's folder of the product: below XDG_CACHE_HOME, else ~/.cache. It need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "radixfleet"
