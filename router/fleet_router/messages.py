"""What the router's processes tell one another over the link. msgpack arrays, tagged by number; all processes are of one build.

    edge → brain      EdgeHello, then Acquire … Over for each attempt, Wait … Over, Blame, Suspect, Report, Draining
    brain → edge      Welcome, then TableNews, Pulse; for each Acquire one of Granted, NoWorker, Refused
    control → brain   Ask, News; brain → control Reply
    both ways         Ask, Reply (the brain asks an edge to probe or explain, an edge asks the brain for an explanation)

A number of an attempt is minted by the edge and never used again in its life. `Over` ends whatever it names, lease, place in the queue
or wait, and ending twice is nothing: so a request that was cancelled while its lease was under way leaves nothing behind. A worker's
number is minted by the brain for one incarnation: the slot of a worker that is gone may have a new one already.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from fleet_contract.errors import ApiError
from fleet_contract.worker import WorkerRecord
from fleet_router.decide.shares import Use
from fleet_router.metrics import Snapshot
from fleet_router.observed import Observed, ServiceFacts

ASK_AGAIN: Final = -2
Identity = tuple[str, int, str]  # pod UID, rank, incarnation


class Ask(Struct, tag=1, array_like=True):
    """A question: `what` names the answerer's method."""

    id: int
    what: str
    args: list[str] = []
    body: bytes = b""


class Reply(Struct, tag=2, array_like=True):
    """The answer: JSON or msgpack bytes as the question says, or an error's status and JSON body."""

    id: int
    status: int = 200
    body: bytes = b""


class News(Struct, tag=3, array_like=True):
    """Discovery's snapshot."""

    observed: Observed


class HeldLeg(Struct, array_like=True):
    """One leg that runs on a worker."""

    identity: Identity
    miss_tokens: int  # prompt tokens that it has to compute
    prompt_tokens: int  # of context, once it decodes
    room_tokens: int


class Held(Struct, array_like=True):
    """One lease of an edge, for a brain that did not give it. A leg that is over is None."""

    number: int
    legs: list[HeldLeg | None]
    started: bool


class EdgeHello(Struct, tag=4, array_like=True):
    """First message of an edge."""

    life: str  # of this process
    index: int
    fresh: bool  # it has no table at all: any is better
    held: list[Held]
    waits: list[tuple[int, tuple[str, str]]]
    draining: bool


class Welcome(Struct, tag=5, array_like=True):
    """The brain's table is complete: from now on it decides. A whole table follows."""

    pick_id: str


class WorkerFacts(Struct, array_like=True, frozen=True):
    """`table.WorkerView` with its number."""

    number: int
    slot: int
    host: str
    record: WorkerRecord
    service: tuple[str, str]
    pod: str
    state: str


class TableNews(Struct, tag=6, array_like=True):
    """What changed in the table since the last one on this connection."""

    version: int
    synced: bool
    services: list[ServiceFacts] | None  # None: as before
    changed: list[WorkerFacts]
    gone: list[int]


class Pulse(Struct, tag=7, array_like=True):
    """The brain lives; each second."""

    synced: bool


class WantFacts(Struct, array_like=True):
    """`lease.Want`; `exclude` by number."""

    service: tuple[str, str]
    prompt_tokens: int
    answer_tokens: int
    revision: str
    keys: tuple[int, ...]
    exclude: list[int]
    request_id: str
    any_role: bool
    prompt_only: bool
    silent: bool
    tenant: str
    klass: str
    size_bytes: int
    key_tokens: float


class Acquire(Struct, tag=8, array_like=True):
    """`Desk.acquire`."""

    number: int
    want: WantFacts
    timeout_s: float


class Granted(Struct, tag=9, array_like=True):
    """A lease; legs prefill first, each a worker's number and a pick's."""

    number: int
    legs: list[tuple[int, int]]
    predicted_tokens: int
    waited_s: float


class NoWorker(Struct, tag=10, array_like=True):
    """No worker is ready, as of a version of the table; `ASK_AGAIN`: older than any."""

    number: int
    version: int


class Refused(Struct, tag=11, array_like=True):
    """An `ApiError` for an Acquire or a Wait."""

    number: int
    status: int
    message: str
    kind: str  # `ApiError.type`
    code: str
    param: str | None
    retry_after_s: int | None

    @classmethod
    def of(cls, number: int, e: ApiError) -> Refused:
        return cls(number, e.status, e.message, e.type, e.code, e.param, e.retry_after_s)

    def error(self) -> ApiError:
        return ApiError(self.status, self.message, type=self.kind, code=self.code, param=self.param, retry_after_s=self.retry_after_s)


class FirstToken(Struct, tag=12, array_like=True):
    """`Lease.first_token`."""

    number: int


class LegOver(Struct, tag=13, array_like=True):
    """`Lease.release_leg`; by position in `Lease.legs`."""

    number: int
    leg: int


class Over(Struct, tag=14, array_like=True):
    """`Lease.release` with what was learned before it, or nobody waits any more."""

    number: int
    well: bool = False  # `Lease.praise`
    cached: int | None = None  # tokens, `Lease.cached`
    steps: int = 0  # in so many seconds, `Lease.answered`
    seconds: float = 0.0


class Wait(Struct, tag=17, array_like=True):
    """`Desk.wait_change`: counted until Over."""

    number: int
    service: tuple[str, str]


class Blame(Struct, tag=18, array_like=True):
    """`Desk.blame`."""

    worker: int


class Suspect(Struct, tag=20, array_like=True):
    """`Desk.suspect`."""

    worker: int
    why: str


class Report(Struct, tag=21, array_like=True):
    """An edge's counters since its start: each second if they have changed, and at its end."""

    counters: Snapshot
    connections: int


class Draining(Struct, tag=22, array_like=True):
    """The edge takes no new clients any more."""


class Uses(Struct, tag=23, array_like=True):
    """What was asked of callers' limits at an edge since it said so last."""

    uses: list[Use]


class Shares(Struct, tag=24, array_like=True):
    """What an edge may give of callers' limits from now on."""

    share: float  # of the limits that have none by name
    shares: dict[str, float]
    handed: dict[str, float]  # units that other edges gave up


ToBrain = (
    Ask | Reply | News | EdgeHello | Acquire | FirstToken | LegOver | Over | Wait | Blame | Suspect | Report | Draining | Uses
)  # fmt: skip
ToOthers = Ask | Reply | Welcome | TableNews | Pulse | Granted | NoWorker | Refused | Shares
Message = ToBrain | ToOthers
