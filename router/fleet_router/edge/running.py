"""The requests that an edge has now, by the id that their clients know, so that an operator can end them. One event loop owns it."""

from __future__ import annotations

from typing import Protocol


class One(Protocol):
    """One request."""

    def abort(self) -> bool:
        """Ends it with an error that its client hears; workers are told. False: it is ending already."""


class Running:
    """Several requests may have the same id: clients choose it."""

    def __init__(self) -> None:
        self._by_id: dict[str, list[One]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_id.values()))

    def add(self, request_id: str, one: One) -> None:
        """It begins."""
        same = self._by_id.get(request_id)
        if same is None:
            self._by_id[request_id] = [one]
        else:
            same.append(one)

    def remove(self, request_id: str, one: One) -> None:
        """It is over."""
        same = self._by_id[request_id]
        if len(same) == 1:
            del self._by_id[request_id]
        else:
            same.remove(one)

    def abort(self, request_id: str) -> int:
        """Ends all requests of this id; how many."""
        return sum([one.abort() for one in list(self._by_id.get(request_id, ()))])
