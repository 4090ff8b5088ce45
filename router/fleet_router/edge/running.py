"""The requests that an edge has now, by the id that their clients know, so that an operator can end them. One event loop owns it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from fleet_router import errors
from fleet_router.edge.relay import Attempt


class RunningOne:
    """One request: its attempt while it has one, else whoever waits for a worker."""

    def __init__(self, task: asyncio.Task[object]) -> None:
        self.task = task
        self.attempt: Attempt | None = None
        self.is_aborted = False


class Running:
    """Several requests may have the same id: clients choose it."""

    def __init__(self) -> None:
        self._by_id: dict[str, list[RunningOne]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_id.values()))

    @contextmanager
    def request(self, request_id: str) -> Iterator[RunningOne]:
        """Around all attempts of a request. Raises ApiError in place of the cancellation by `abort`."""
        task = asyncio.current_task()
        assert task is not None
        one = RunningOne(task)
        self._by_id.setdefault(request_id, []).append(one)
        try:
            yield one
        except asyncio.CancelledError:
            if not one.is_aborted:
                raise
            one.task.uncancel()
            raise errors.aborted() from None
        finally:
            mine = self._by_id[request_id]
            mine.remove(one)
            if not mine:
                del self._by_id[request_id]

    def abort(self, request_id: str) -> int:
        """Ends all requests of this id with an error; how many. Workers are told."""
        found = [one for one in self._by_id.get(request_id, ()) if not one.is_aborted]
        for one in found:
            one.is_aborted = True
            if one.attempt is not None:
                one.attempt.abort(errors.aborted())
            else:
                one.task.cancel()
        return len(found)
