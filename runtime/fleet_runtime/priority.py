"""Front-end work yields to the engine: a compute thread that is descheduled holds up every barrier of a step."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

_NICE: Final = 10
AUTOGROUP: Final = Path("/proc/self/autogroup")


def yield_to_engine() -> None:
    """Lowers the priority of every thread of this process; later threads inherit it. Linux keeps it per thread (setpriority(2), notes).

    Where the kernel groups processes by session (autogroup, on by default outside of cgroups), a priority counts inside a session only: the
    group of ours, of which this process is the leader, gets the same one. Source: sched(7), "The autogroup feature".

    Called by http and the detokenizer once they are loaded: a restart itself must be quick.
    """
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread that ended meanwhile
            os.setpriority(os.PRIO_PROCESS, int(task.name), _NICE)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):  # no such feature, or /proc is read-only
            AUTOGROUP.write_text(str(_NICE))
