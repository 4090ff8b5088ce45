"""Front-end work yields to the engine: a compute thread that is descheduled holds up every barrier of a step."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

_NICE: Final = 10


def yield_to_engine() -> None:
    """Lowers the priority of every thread of this process; later threads inherit it. Linux keeps it per thread (setpriority(2), notes).

    Called by http and the detokenizer once they are loaded: a restart itself must be quick.
    """
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread that ended meanwhile
            os.setpriority(os.PRIO_PROCESS, int(task.name), _NICE)
