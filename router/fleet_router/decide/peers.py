"""What routers in front of the same workers tell one another: their picks in flight, as changes at once and as a whole each second.

Every message says how picks are now, not what happened to them: one that comes twice changes nothing, and whatever was lost, the next whole
state puts right. A pick keeps the number that its worker's reports call it by, so a report that holds it takes it out of our sum as it does
with picks of ours, whichever comes first: nothing counts twice. A router is known by the name of its process life; a new life starts empty.
One that says nothing for SILENT_S is forgotten, with all its picks: from then on the workers' reports tell of them.

Prompts are not told: what workers hold every router reads from their KV events.

`PeerBook` is pure: it writes other routers' picks over the load model, and makes the messages about ours.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct

from fleet_router.decide.load import LoadTable, Pick, SlotLoad

SILENT_S: Final = 3.0

Identity = tuple[str, int, str]  # pod UID, rank, incarnation: one life of a worker


class PickFacts(Struct, array_like=True, frozen=True):
    """One pick as it is. Tokens as in `load.Pick`."""

    number: int
    pend: int
    prompt: int
    room: int
    started: bool = False


class WorkerPicks(Struct, array_like=True, frozen=True):
    """Picks of one router on one worker."""

    pod_uid: str
    rank: int
    incarnation: str
    picks: list[PickFacts] = []
    ended: list[int] = []

    @property
    def identity(self) -> Identity:
        return (self.pod_uid, self.rank, self.incarnation)


class PeerMessage(Struct, array_like=True, frozen=True):
    """What one router says."""

    router: str  # the name of its process life in load reports
    whole: bool = False  # all its picks, not only those that changed
    leaving: bool = False  # its last message
    workers: list[WorkerPicks] = []


@dataclass(slots=True, eq=False)
class Peer:
    """Another router, at one address."""

    key: str
    router: str = ""  # its life
    known: bool = False  # its whole state is here, and it is not silent
    is_left: bool = False  # it said that it goes
    is_ourselves: bool = False
    heard_at: float = 0.0
    picks: dict[Identity, dict[int, PickFacts]] = field(default_factory=dict)


class PeerBook:
    """See the module."""

    def __init__(self, load: LoadTable, name: str) -> None:
        self.peers: dict[str, Peer] = {}
        self._load = load
        self._name = name
        self._loads: dict[Identity, SlotLoad] = {}
        self._identities: dict[SlotLoad, Identity] = {}
        load.shared = True

    # -- who there is

    def expect(self, keys: Collection[str]) -> None:
        """The other routers that there should be; our own address may be among them."""
        for key in [k for k in self.peers if k not in keys]:
            self._forget(self.peers.pop(key))
        for key in keys:
            self.peers.setdefault(key, Peer(key))
        self._count()

    @property
    def live(self) -> int:
        """Other routers whose picks count here."""
        return sum(p.known for p in self.peers.values())

    @property
    def expected(self) -> int:
        """Other routers that there should be."""
        return sum(not p.is_ourselves and not p.is_left for p in self.peers.values())

    def worker_added(self, identity: Identity, load: SlotLoad) -> None:
        """A worker can be picked from now on; what others have there already counts."""
        self._loads.setdefault(identity, load)
        self._identities[load] = identity
        for peer in self.peers.values():
            _set(load, peer.router, peer.picks.get(identity, {}).values(), peer.heard_at)

    def worker_gone(self, load: SlotLoad) -> None:
        """A worker's life is over."""
        identity = self._identities.pop(load)
        if self._loads.get(identity) is load:  # else the same worker was named twice
            del self._loads[identity]

    # -- what they say

    def take(self, key: str, message: PeerMessage, now: float) -> None:
        """A message of the router at an address. Changes of one whose whole state is not known yet are nothing."""
        peer = self.peers.get(key)
        if peer is None or peer.is_ourselves:
            return
        if message.router == self._name or any(p.known and p.router == message.router for p in self.peers.values() if p is not peer):
            peer.is_ourselves = message.router == self._name
            return  # ourselves, or a second address of one that is known already
        peer.is_left = message.leaving
        if message.router != peer.router or message.leaving:
            self._forget(peer)
            peer.router = message.router
        if message.whole and not message.leaving:
            peer.known = True
            self._replace(peer, message.workers, now)
        elif peer.known:
            self._change(peer, message.workers, now)
        peer.heard_at = now
        self._count()

    def tick(self, now: float) -> list[Peer]:
        """Forgets routers that have been silent for too long; returns these."""
        silent = [p for p in self.peers.values() if p.known and now - p.heard_at > SILENT_S]
        for peer in silent:
            self._forget(peer)
        self._count()
        return silent

    def _replace(self, peer: Peer, workers: list[WorkerPicks], now: float) -> None:
        told = {w.identity: {p.number: p for p in w.picks} for w in workers}
        for identity, old in peer.picks.items():
            load, new = self._loads.get(identity), told.get(identity, {})
            if load is not None:
                for number in old.keys() - new.keys():
                    load.end_other(peer.router, number)
        peer.picks = told
        for identity, picks in told.items():
            if (load := self._loads.get(identity)) is not None:
                _set(load, peer.router, picks.values(), now)

    def _change(self, peer: Peer, workers: list[WorkerPicks], now: float) -> None:
        for w in workers:
            picks, load = peer.picks.setdefault(w.identity, {}), self._loads.get(w.identity)
            picks.update((p.number, p) for p in w.picks)
            for number in w.ended:
                picks.pop(number, None)
            if load is not None:
                _set(load, peer.router, w.picks, now)
                for number in w.ended:
                    load.end_other(peer.router, number)

    def _forget(self, peer: Peer) -> None:
        for identity in peer.picks:
            if (load := self._loads.get(identity)) is not None:
                load.forget_others(peer.router)
        peer.picks = {}
        peer.known = False

    def _count(self) -> None:
        self._load.set_routers(1 + self.live)

    # -- what we say

    def changes(self) -> PeerMessage | None:
        """The picks that changed since the last message; None when there are none."""
        workers = [self._told(load, numbers) for load, numbers in self._load.take_unsent() if load in self._identities]
        return PeerMessage(self._name, workers=workers) if workers else None

    def everything(self) -> PeerMessage:
        """All our picks."""
        self._load.take_unsent()
        return PeerMessage(self._name, whole=True, workers=[self._told(load, load.picks) for load in self._identities if load.picks])

    def farewell(self) -> PeerMessage:
        """The last message."""
        return PeerMessage(self._name, leaving=True)

    def _told(self, load: SlotLoad, numbers: Iterable[int]) -> WorkerPicks:
        picks: list[PickFacts] = []
        ended: list[int] = []
        for number in numbers:
            pick = load.picks.get(number)
            if pick is None:
                ended.append(number)
            else:
                picks.append(PickFacts(number, pick.pend_tokens, pick.prompt_tokens, pick.room_tokens, pick.started))
        return WorkerPicks(*self._identities[load], picks, ended)


def _set(load: SlotLoad, router: str, picks: Iterable[PickFacts], now: float) -> None:
    for p in picks:
        load.set_other(router, Pick(p.number, p.pend, p.prompt, p.room, now, p.started), now)
