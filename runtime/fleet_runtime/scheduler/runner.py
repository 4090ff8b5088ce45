"""Runs steps: on a thread of its own, so that the loop works meanwhile, or in the caller for tests and measurements over a virtual clock.

One step is computed at a time, in the order of launch; at most one more waits behind it. The thread holds the interpreter's lock only while
the executor is in Python. An exception of the executor is a fault of the device or of ours: it comes out of `Ticket.result`.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from fleet_runtime.engine.base import Executor, Sampling, StepInput, StepOutput


class Ticket:
    """The result of one launched step. Written once by the runner, then read by the loop; it keeps the step's arrays alive until then."""

    __slots__ = ("_batch", "_error", "_output", "begun", "done", "ended")

    def __init__(self, batch: StepInput) -> None:
        self._batch = batch
        self._output: StepOutput | None = None
        self._error: BaseException | None = None
        self.done = False
        self.begun = 0.0  # time.monotonic() when the executor began with it; 0: not yet
        self.ended = 0.0

    def set(self, output: StepOutput | None, error: BaseException | None) -> None:
        self._output, self._error = output, error
        self.ended = time.monotonic()
        self.done = True

    def result(self) -> StepOutput:
        """Raises what the executor raised."""
        assert self.done
        if self._error is not None:
            raise self._error
        assert self._output is not None
        return self._output


class Runner(Protocol):
    """See the module. Called by the loop's thread only."""

    def step(self, batch: StepInput, sampling: Sampling) -> Ticket:
        """Launches a whole step."""
        ...

    def forward(self, batch: StepInput) -> Ticket:
        """Launches a step whose draw follows by `sample` before any other launch."""
        ...

    def sample(self, ticket: Ticket, sampling: Sampling) -> None:
        """Lets the step of the last `forward` draw."""
        ...

    def close(self) -> None: ...


class InlineRunner:
    """Computes in the caller, at once."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def step(self, batch: StepInput, sampling: Sampling) -> Ticket:
        ticket = Ticket(batch)
        ticket.begun = time.monotonic()
        ticket.set(self._executor.step(batch, sampling), None)
        return ticket

    def forward(self, batch: StepInput) -> Ticket:
        ticket = Ticket(batch)
        ticket.begun = time.monotonic()
        self._executor.forward(batch)
        return ticket

    def sample(self, ticket: Ticket, sampling: Sampling) -> None:
        ticket.set(self._executor.sample(sampling), None)

    def close(self) -> None:
        return None


class ThreadRunner:
    """One engine thread. `wake_fd` becomes readable when a step is done; `drain_wake` clears it."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def step(self, batch: StepInput, sampling: Sampling) -> Ticket:
        ticket = Ticket(batch)
        self._jobs.put(lambda: self._finish(ticket, lambda: self._executor.step(batch, sampling)))
        return ticket

    def forward(self, batch: StepInput) -> Ticket:
        ticket = Ticket(batch)
        self._jobs.put(lambda: self._begin(ticket, batch))
        return ticket

    def sample(self, ticket: Ticket, sampling: Sampling) -> None:
        self._jobs.put(lambda: self._finish(ticket, lambda: self._executor.sample(sampling)))

    def wake(self) -> None:
        """Makes `wake_fd` readable; any thread may call it."""
        os.eventfd_write(self.wake_fd, 1)

    def drain_wake(self) -> None:
        """Clears the wake-up; the caller then looks at its tickets."""
        try:
            os.eventfd_read(self.wake_fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Ends the thread after what it computes now; waits a moment for it."""
        self._jobs.put(None)
        self._thread.join(0.5)
        if not self._thread.is_alive():
            os.close(self.wake_fd)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _begin(self, ticket: Ticket, batch: StepInput) -> None:
        ticket.begun = time.monotonic()
        try:
            self._executor.forward(batch)
        except BaseException as e:  # comes out of the ticket, in the loop's thread
            ticket.set(None, e)
            self.wake()

    def _finish(self, ticket: Ticket, compute: Callable[[], StepOutput]) -> None:
        if ticket.done:  # its forward failed
            return
        if not ticket.begun:
            ticket.begun = time.monotonic()
        try:
            ticket.set(compute(), None)
        except BaseException as e:  # comes out of the ticket, in the loop's thread
            ticket.set(None, e)
        self.wake()
