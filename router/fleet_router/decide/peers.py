"""What routers in front of the same workers tell one another: their picks in flight, as changes at once and as a whole each second.

Every message says how picks are now, not what happened to them: one that comes twice changes nothing, and whatever was lost, the next whole
state puts right. A pick keeps the number that its worker's reports call it by, so a report that holds it takes it out of our sum as it does
with picks of ours, whichever comes first: nothing counts twice. A router is known by the name of its process life; a new life starts empty.
One that says nothing for SILENT_S is forgotten, with all its picks: from then on the workers' reports tell of them.

Of a prompt a few keys are told (`told`) until it has its first token. So the others foresee where a prefix will be, and of workers without KV
events remember it; what workers with events hold, every router reads for itself. Also told: what waits, see `rivals`.

`PeerBook` is pure: it writes other routers' picks over the load model, and makes the messages about ours.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol

from msgspec import Struct

from fleet_router.decide.index import PrefixIndex
from fleet_router.decide.lives import Expectation
from fleet_router.decide.load import LoadTable, Pick, SlotLoad
from fleet_router.decide.rivals import Rivals, Wish
from fleet_router.decide.shares import ShareBook
from fleet_router.decide.told import Prefix

SILENT_S: Final = 3.0

Identity = tuple[str, int, str]  # pod UID, rank, incarnation: one life of a worker


class PickFacts(Struct, array_like=True, frozen=True):
    """One pick as it is. Tokens as in `load.Pick`."""

    number: int
    pend: int
    prompt: int
    room: int
    started: bool = False
    prefix: list[tuple[int, int]] = []  # until it has started: some keys of its prompt, see `told`
    key_tokens: float = 0.0  # of these keys, when they are of bytes


class WorkerPicks(Struct, array_like=True, frozen=True):
    """Picks of one router on one worker."""

    pod_uid: str
    rank: int
    incarnation: str
    picks: list[PickFacts] = []
    ended: list[int] = []
    speeds: tuple[float, float] | None = None  # learned: factors of the profile's prefill and step speed; None: as they were told last

    @property
    def identity(self) -> Identity:
        return (self.pod_uid, self.rank, self.incarnation)


class WishFacts(Struct, array_like=True, frozen=True):
    """The best request that waits for a worker at one router. See `rivals`."""

    pod_uid: str
    rank: int
    incarnation: str
    order: float  # now
    tokens: int
    keeps: bool = False

    @property
    def identity(self) -> Identity:
        return (self.pod_uid, self.rank, self.incarnation)


class PeerMessage(Struct, array_like=True, frozen=True):
    """What one router says."""

    router: str  # the name of its process life in load reports
    whole: bool = False  # all its picks, not only those that changed
    leaving: bool = False  # its last message
    workers: list[WorkerPicks] = []
    wishes: list[WishFacts] | None = None  # None: as they were told last
    demand: list[tuple[str, float]] | None = None  # what is asked of callers' limits, see `shares`; None: as it was told last


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
    speeds: dict[Identity, tuple[float, float]] = field(default_factory=dict)


class Prefixes(Protocol):
    """Where prompts of other routers went: `fleet.Fleet`."""

    @property
    def index(self) -> PrefixIndex: ...

    def foresee(self, slot: int, prefix: Prefix, key_tokens: float = 0.0) -> Expectation | None: ...


class PeerBook:
    """See the module."""

    def __init__(
        self, load: LoadTable, name: str, rivals: Rivals | None = None, prefixes: Prefixes | None = None, limits: ShareBook | None = None
    ) -> None:
        self.peers: dict[str, Peer] = {}
        self._load = load
        self._rivals = rivals or Rivals()
        self._prefixes = prefixes
        self._limits = limits or ShareBook(1)
        self._foreseen: dict[tuple[SlotLoad, str, int], Expectation | None] = {}  # by worker, router and pick, those without a first token
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
            self._set(load, peer.router, peer.picks.get(identity, {}).values(), peer.heard_at)
            if (speeds := peer.speeds.get(identity)) is not None:
                load.set_speeds(peer.router, speeds)

    def worker_gone(self, load: SlotLoad) -> None:
        """A worker's life is over."""
        identity = self._identities.pop(load)
        self._foreseen = {name: e for name, e in self._foreseen.items() if name[0] is not load}  # the index forgets them by itself
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
        if message.wishes is not None and peer.known:
            self._take_wishes(peer, message.wishes, now)
        if message.demand is not None and peer.known:
            self._limits.hear(peer.router, message.demand)
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
                    self._end(load, peer.router, number)
        peer.picks = told
        peer.speeds = {w.identity: w.speeds for w in workers if w.speeds is not None}
        for identity, speeds in peer.speeds.items():
            if (load := self._loads.get(identity)) is not None:
                load.set_speeds(peer.router, speeds)
        for identity, picks in told.items():
            if (load := self._loads.get(identity)) is not None:
                self._set(load, peer.router, picks.values(), now)

    def _change(self, peer: Peer, workers: list[WorkerPicks], now: float) -> None:
        for w in workers:
            picks, load = peer.picks.setdefault(w.identity, {}), self._loads.get(w.identity)
            picks.update((p.number, p) for p in w.picks)
            for number in w.ended:
                picks.pop(number, None)
            if load is not None:
                self._set(load, peer.router, w.picks, now)
                for number in w.ended:
                    self._end(load, peer.router, number)

    def _take_wishes(self, peer: Peer, wishes: list[WishFacts], now: float) -> None:
        aged = self._rivals.age_weight * now
        found: dict[int, tuple[Wish, ...]] = {}
        for w in wishes:
            if (load := self._loads.get(w.identity)) is not None:
                found[load.slot] = (*found.get(load.slot, ()), Wish(w.order + aged, w.tokens, w.keeps))
        self._rivals.set_theirs(peer.router, found)

    def _forget(self, peer: Peer) -> None:
        self._rivals.set_theirs(peer.router, {})
        self._limits.forget(peer.router)
        for identity in peer.picks:
            if (load := self._loads.get(identity)) is not None:
                for number in list(load.others.get(peer.router, ())):
                    self._end(load, peer.router, number)
        if peer.router:
            for load in self._loads.values():
                load.set_speeds(peer.router, None)
        peer.picks, peer.speeds = {}, {}
        peer.known = False

    def _set(self, load: SlotLoad, router: str, picks: Iterable[PickFacts], now: float) -> None:
        for p in picks:
            load.set_other(router, Pick(p.number, p.pend, p.prompt, p.room, now, p.started), now)
            if self._prefixes is not None:
                name = (load, router, p.number)
                if not p.started and p.prefix and name not in self._foreseen:
                    self._foreseen[name] = self._prefixes.foresee(load.slot, p.prefix, p.key_tokens)
                elif p.started and (expectation := self._foreseen.pop(name, None)) is not None:
                    self._prefixes.index.settle(expectation, now)

    def _end(self, load: SlotLoad, router: str, number: int) -> None:
        load.end_other(router, number)
        if (expectation := self._foreseen.pop((load, router, number), None)) is not None and self._prefixes is not None:
            self._prefixes.index.cancel(expectation)

    def _count(self) -> None:
        self._load.set_routers(1 + self.live)

    # -- what we say

    def changes(self, now: float) -> PeerMessage | None:
        """The picks that changed since the last message, and our wishes if any did; None when nothing did."""
        workers = [self._told(load, numbers) for load, numbers in self._load.take_unsent() if load in self._identities]
        wishes = self._wishes(now) if self._rivals.take_changed() else None
        return PeerMessage(self._name, workers=workers, wishes=wishes) if workers or wishes is not None else None

    def everything(self, now: float) -> PeerMessage:
        """All our picks and wishes."""
        self._load.take_unsent()
        self._rivals.take_changed()
        workers = [self._told(load, load.picks, speeds=load.tell_speeds()) for load in self._identities]
        return PeerMessage(self._name, whole=True, workers=workers, wishes=self._wishes(now), demand=self._limits.tell(now))

    def _wishes(self, now: float) -> list[WishFacts]:
        aged = self._rivals.age_weight * now
        told = self._rivals.told()
        identities = {load.slot: identity for load, identity in self._identities.items() if load.slot in told}
        return [
            WishFacts(*identities[slot], w.level - aged, w.tokens, w.keeps)
            for slot, wishes in told.items() if slot in identities for w in wishes
        ]  # fmt: skip

    def farewell(self) -> PeerMessage:
        """The last message."""
        return PeerMessage(self._name, leaving=True)

    def _told(self, load: SlotLoad, numbers: Iterable[int], speeds: tuple[float, float] | None = None) -> WorkerPicks:
        picks: list[PickFacts] = []
        ended: list[int] = []
        for number in numbers:
            pick = load.picks.get(number)
            if pick is None:
                ended.append(number)
            else:
                prefix = list(pick.prefix) if not pick.started else []
                picks.append(PickFacts(number, pick.pend_tokens, pick.prompt_tokens, pick.room_tokens, pick.started, prefix, pick.key_tokens))
        return WorkerPicks(*self._identities[load], picks, ended, speeds)
