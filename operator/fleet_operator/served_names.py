"""Which service a short served name belongs to: the oldest; full names `<namespace>/<name>` always belong to their service.

Fed by events and listings; the routers decide the same on their own, this is for the status only.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleet_operator.facts import Key, Obj


@dataclass(frozen=True, slots=True)
class _Entry:
    served: str
    created: str


class ServedNames:
    """The names of all services that this operator sees."""

    def __init__(self) -> None:
        self._entries: dict[Key, _Entry] = {}

    def update(self, obj: Obj) -> set[Key]:
        """Takes a service as it stands (or going); returns the other services whose claim may have changed."""
        meta = obj["metadata"]
        key = Key(meta["namespace"], meta["name"])
        old = self._entries.pop(key, None)
        new = None
        if "deletionTimestamp" not in meta:
            served = str(((obj.get("spec") or {}).get("model") or {}).get("name") or meta["name"])
            new = self._entries[key] = _Entry(served, str(meta["creationTimestamp"]))
        return set() if old == new else self._rivals(key, {e.served for e in (old, new) if e is not None})

    def remove(self, key: Key) -> set[Key]:
        """The service is gone; returns the services that may now have its name."""
        old = self._entries.pop(key, None)
        return set() if old is None else self._rivals(key, {old.served})

    def known(self) -> set[Key]:
        """All services that are known."""
        return set(self._entries)

    def holder(self, key: Key) -> str:
        """`<namespace>/<name>` of the other service that has this one's short name; empty when the name is its own."""
        mine = self._entries.get(key)
        if mine is None:
            return ""
        rivals = {k: e for k, e in self._entries.items() if k != key}
        if (owner := next((k for k in rivals if f"{k.namespace}/{k.name}" == mine.served), None)) is None:
            older = [k for k, e in rivals.items() if e.served == mine.served and (e.created, k) < (mine.created, key)]
            owner = min(older, key=lambda k: (self._entries[k].created, k)) if older else None
        return "" if owner is None else f"{owner.namespace}/{owner.name}"

    def _rivals(self, key: Key, served: set[str]) -> set[Key]:
        full = f"{key.namespace}/{key.name}"
        return {k for k, e in self._entries.items() if k != key and (e.served in served or e.served == full)}
