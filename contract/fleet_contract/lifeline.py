"""A child process dies with its parent, also when the parent is killed: prctl(2), PR_SET_PDEATHSIG. Linux only; elsewhere nothing happens.

The signal comes when the *thread* that started the child ends, so a parent starts its children from its main thread.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_libc: Final = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def before_exec(parent: int) -> Callable[[], None]:
    """For `subprocess.Popen(preexec_fn=…)`. Runs in the child between fork and exec: only system calls, no locks, no imports."""

    def prepare() -> None:
        if _libc is not None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent died before prctl
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())

    return prepare


def die_with_parent(parent: int) -> None:
    """For a child that was started without `before_exec`. Exits now if the parent is gone already."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)
