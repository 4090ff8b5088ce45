"""One at a time: a lock on a file that goes with its process, however that ends. Standard library only (dev/setup runs it before the set-up)."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def one_at_a_time(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Holds the lock of `path` (made when missing); `on_wait` is called once if somebody else holds it. Blocks until it is free."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(f, fcntl.LOCK_EX)
        yield
