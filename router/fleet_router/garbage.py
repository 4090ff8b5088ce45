"""Cyclic garbage of a process that keeps much and makes few cycles: each object is looked through once, when it is young.

What outlives that look is put aside (`gc.freeze`) and freed by its references alone. Cycles that come to be among what was put aside are
found by a look at everything, once the process has grown by a quarter since the last.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from typing import Any, Final

YOUNG_OBJECTS: Final = 10_000  # made and not freed since garbage was looked for
WHOLE_EVERY_S: Final = 60.0  # it is asked so often whether the process has grown
GROWN: Final = 1.25
GROWN_BLOCKS: Final = 1_000_000  # of allocated memory: less is no growth


class Sweeper:
    """One per process, from the end of its start on."""

    def __init__(self) -> None:
        self._blocks = 0
        self.whole = 0  # looks at everything

    def start(self) -> None:
        """What is there stays. Needs the running loop."""
        gc.set_threshold(YOUNG_OBJECTS)
        gc.callbacks.append(self._put_aside)
        self._look_whole()
        asyncio.get_running_loop().call_later(WHOLE_EVERY_S, self._on_timer)

    def check(self) -> None:
        """Looks at everything if the process has grown."""
        if sys.getallocatedblocks() > GROWN * self._blocks + GROWN_BLOCKS:
            self._look_whole()

    def _put_aside(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "stop":
            gc.freeze()

    def _look_whole(self) -> None:
        gc.unfreeze()
        gc.collect()  # and what is left is put aside
        self._blocks = sys.getallocatedblocks()
        self.whole += 1

    def _on_timer(self) -> None:
        self.check()
        asyncio.get_running_loop().call_later(WHOLE_EVERY_S, self._on_timer)
