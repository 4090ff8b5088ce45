"""What crosses between the processes of one runtime: msgspec structs over one-way ZMQ PUSH/PULL ipc channels.

                    Admit Abort RoomRejected
        http ───────────────────────────────► scheduler ◄──────────── Stopped
         ▲                                        │ SampledBatch Failed HandedOver │
         │ TextBatch Failed HandedOver            ▼                                │
         └─────────────────────────────── detokenizer ─────────────────────────────┘
        every child ── Ready ──► supervisor ── Peers PeerDied Drain ──► every child

Each process binds one PULL socket (`endpoint`) and connects PUSH sockets to its neighbours. Messages are sent without blocking: a dead
child must not stop its writer. Each message names the incarnation of its sender and of its addressee; a process drops mail that was
addressed to another incarnation, or that comes from a sender that is no longer its peer. No tensors, no pickle.

Every accepted (rid, index) ends in exactly one terminal message to http: `Text` with `finish`, `Failed`, or `HandedOver`. All of them
pass the detokenizer. When a process dies, `PeerDied` ends what it carried: http answers its clients, the scheduler frees the pages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct, field

from fleet_contract.worker import Profile

SUPERVISOR: Final = "supervisor"
HTTP: Final = "http"
SCHEDULER: Final = "scheduler"
DETOKENIZER: Final = "detokenizer"
CHILDREN: Final = (SCHEDULER, DETOKENIZER, HTTP)


def endpoint(run_dir: str | Path, process: str) -> str:
    """ZMQ address of a process's PULL socket."""
    return f"ipc://{run_dir}/{process}.in"


class _Message(Struct, tag_field="m", array_like=True, kw_only=True):
    sender: str = ""  # incarnation (16 hex) of the process that wrote this
    to: str = ""  # incarnation of the addressee; "" only between supervisor and a child that starts


class SchedulerInfo(Struct, array_like=True, frozen=True):
    """What only the scheduler knows: it is in its `Ready`, then in every `Peers`. Ports 0: not offered."""

    kv_capacity_tokens: int = 0
    max_rows: int = 0
    bootstrap_port: int = 0
    transfer_port: int = 0
    load_port: int = 0
    transfer_backends: list[str] = field(default_factory=list)
    profile: Profile = Profile()


class Ready(_Message, tag="ready"):
    """Child -> supervisor: my PULL socket is bound and I can work."""

    who: str
    pid: int
    scheduler_info: SchedulerInfo | None = None


class Peers(_Message, tag="peers"):
    """Supervisor -> every child, when all are ready and after each replacement: who lives. A child works only after its first `Peers`."""

    http: str
    scheduler: str
    detokenizer: str
    scheduler_info: SchedulerInfo


class PeerDied(_Message, tag="peer_died"):
    """Supervisor -> the other children: this incarnation is gone. Ends everything that it carried."""

    who: str
    incarnation: str
    cause: str  # in words, with exit code or signal


class Drain(_Message, tag="drain"):
    """Supervisor -> http and scheduler: no new requests; those that run may end until the deadline (CLOCK_MONOTONIC seconds)."""

    deadline: float


class Admit(_Message, tag="admit"):
    """Http -> scheduler: a checked request. `ids` are little-endian u32, at least one; len(ids) + max_new fits the context."""

    rid: str  # 32 hex
    index: int = 0  # choice: prompt number of a batch
    ids: bytes = b""
    max_new: int = 1
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    seed: int = 0  # u64, minted by http if the client gave none
    stop_ids: list[int] = field(default_factory=list)  # EOS ids; empty with ignore_eos
    stop: list[str] = field(default_factory=list)
    leg: str = ""  # "", prefill, decode
    room: int = 0
    bootstrap: str = ""  # host:port, for a decode leg
    prefill_incarnation: str = ""
    deadline: float = 0.0  # CLOCK_MONOTONIC seconds for the first token
    router_id: str = ""  # of X-Radixfleet-Pick
    pick: int = -1


class Abort(_Message, tag="abort"):
    """Http -> scheduler: end all choices of this exact rid. Idempotent. The terminal message is `Failed` with code `aborted`."""

    rid: str
    reason: str = ""


class RoomRejected(_Message, tag="room_rejected"):
    """Http -> scheduler: a leg was refused before `Admit`; tombstone its rooms and tell the peer why."""

    rooms: list[int]
    leg: str
    bootstrap: str = ""
    prefill_incarnation: str = ""
    status: int = 400
    type: str = ""
    code: str = ""
    message: str = ""


class OpenText(Struct, array_like=True):
    """In a choice's first `Sampled`: what the detokenizer needs to know of it."""

    prompt_tail: list[int]  # the last few prompt ids, so that the first token joins them as it should
    stop: list[str]
    prompt_tokens: int


class Sampled(Struct, array_like=True):
    """New tokens of one choice. `finish`: stop | length | None while it goes on. A stop id is not in `ids` but counts in `completion_tokens`."""

    rid: str
    index: int
    ids: list[int]
    completion_tokens: int
    finish: str | None = None
    cached_tokens: int = 0
    open: OpenText | None = None


class SampledBatch(_Message, tag="sampled"):
    """Scheduler -> detokenizer: all new tokens of one step."""

    items: list[Sampled]


class Text(Struct, array_like=True):
    """New text of one choice. Texts of a choice, joined, are the decoded answer. `finish` makes it terminal."""

    rid: str
    index: int
    text: str
    ids: list[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    finish: str | None = None


class TextBatch(_Message, tag="text"):
    """Detokenizer -> http. An item with empty text and no finish is still sent for the first token (it ends the wait for it)."""

    items: list[Text]


class Stopped(_Message, tag="stopped"):
    """Detokenizer -> scheduler: a stop string was met; the detokenizer has already sent the terminal `Text`. The scheduler frees the
    choice and sends no terminal message for it."""

    rid: str
    index: int


class Failed(_Message, tag="failed"):
    """Scheduler -> detokenizer -> http, terminal: an error of this choice (fields of ApiError)."""

    rid: str
    index: int
    status: int
    type: str
    code: str
    message: str


class HandedOver(_Message, tag="handed_over"):
    """Scheduler -> detokenizer -> http, terminal of a prefill leg: decode has received everything."""

    rid: str
    index: int
    cached_tokens: int
    prompt_tokens: int


Message = (
    Ready | Peers | PeerDied | Drain | Admit | Abort | RoomRejected | SampledBatch | TextBatch | Stopped | Failed | HandedOver
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Bytes of one ZMQ frame."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Inverse of `encode`. Raises msgspec.DecodeError: both ends are of one version, so that is a bug."""
    return _decoder.decode(data)
