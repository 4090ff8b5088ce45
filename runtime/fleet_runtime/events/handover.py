"""Between the scheduler's thread and the publisher's: a queue of whole steps, bounded in blocks. Neither side ever waits for the other.

When it is full, changes are dropped until the publisher's side has caught up; then the stream starts over in the open: all blocks cleared,
and what the tree holds now. A snapshot comes through the same queue, so that it holds exactly what the steps before it have told.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from fleet_runtime.cache.events import EMPTIED, Change, ChangeLog, blocks_of
from fleet_runtime.cache.radix import RadixTree

log = logging.getLogger(__name__)
MAX_QUEUED_BLOCKS: Final = 65_536  # some 10 MB
SNAPSHOT_EVERY_S: Final = 0.2  # at most so often: each costs the scheduler's thread a walk over the tree


@dataclass(frozen=True, slots=True)
class Step:
    """Changes to publish."""

    changes: Sequence[Change]
    blocks: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that the tree held behind the steps before this."""

    runs: Sequence[Change]


class Handover:
    """See the module. `publish` and `tree` are the scheduler's, all else is the publisher's."""

    def __init__(
        self, tree: RadixTree, model_revision: str, *, max_blocks: int = MAX_QUEUED_BLOCKS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tree = tree
        self._log = ChangeLog(model_revision)
        self._max_blocks = max_blocks
        self._clock = clock
        self._queue: deque[Step | Snapshot] = deque()
        self._given = self._taken = 0  # blocks; one thread writes the one, one the other
        self._lost = False
        self._snapshot_wanted = False
        self._next_snapshot = 0.0
        self.restarts = 0  # of the stream, because the queue was full
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # readable when there may be something to take
        tree.listen(self._log)

    def publish(self) -> None:
        """Hands over what the tree has changed since the last call, in order."""
        changes = self._log.take()
        if self._lost:
            if self._given != self._taken:
                return
            self._lost = False
            self.restarts += 1
            self._give(Step([EMPTIED, *self._tree.runs()], 0))  # its runs are the tree's: no memory of the queue's
        elif changes:
            blocks = sum(map(blocks_of, changes))
            queued = self._given - self._taken
            if queued and queued + blocks > self._max_blocks:
                self._lost = True
                log.warning("KV events come faster than they can be sent; the stream will start over with all that is held")
                return
            self._given += blocks
            self._give(Step(changes, blocks))
        if self._snapshot_wanted and self._clock() >= self._next_snapshot:
            self._snapshot_wanted = False  # first: who asks from here on may be content with this one, or gets the next
            self._give(Snapshot(list(self._tree.runs())))
            self._next_snapshot = self._clock() + SNAPSHOT_EVERY_S

    def _give(self, item: Step | Snapshot) -> None:
        self._queue.append(item)
        self.wake()

    def wake(self) -> None:
        """Makes `wake_fd` readable."""
        os.eventfd_write(self.wake_fd, 1)

    def want_snapshot(self) -> None:
        """One of the next `publish` gives a snapshot."""
        self._snapshot_wanted = True

    def calm(self) -> None:
        """`wake_fd` is not readable until the next thing is given. To be called before `take`."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)

    def take(self) -> Step | Snapshot | None:
        """The oldest thing that was given; None when there is nothing. A step's blocks count as queued until `sent`."""
        return self._queue.popleft() if self._queue else None

    def sent(self, item: Step | Snapshot) -> None:
        """A thing that was taken is out."""
        if isinstance(item, Step):
            self._taken += item.blocks

    def close(self) -> None:
        """Both sides are done."""
        os.close(self.wake_fd)
