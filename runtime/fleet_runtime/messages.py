"""What crosses between the processes of one runtime: msgspec structs over one-way ZMQ PUSH/PULL ipc channels.

                    Admit Abort Stopped RoomRejected Control
        http ───────────────────────────────► scheduler ◄──────────── Stopped
         ▲                                        │ SampledBatch Failed HandedOver │ (Embedded ControlReply too)
         │ TextBatch Failed HandedOver            ▼                                │
         └─────────────────────────────── detokenizer ─────────────────────────────┘
        every child ── Ready ──► supervisor ── Peers PeerDied Drain ──► every child

Each process binds one PULL socket (`endpoint`) and connects PUSH sockets to its neighbours. Messages are sent without blocking: a dead
child must not stop its writer. Each message names the incarnation of its sender and of its addressee; a process drops mail that was
addressed to another incarnation, or that comes from a sender that is no longer its peer. No tensors, no pickle.

Every accepted (rid, index) ends in exactly one terminal message to http: `Text` with `finish`, `Failed`, `HandedOver` or `Embedded`. All of them
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
    events_port: int = 0
    replay_port: int = 0
    transfer_backends: list[str] = field(default_factory=list)
    profile: Profile = Profile()
    vocab_size: int = 0  # of the model: ids from here on have no weights, though the tokenizer may have some; 0: not told


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


class Grammar(Struct, array_like=True, frozen=True):
    """What the answer must be. kind: json_schema, regex, lark, or choice (text: a JSON list of texts). Checked by http, compiled by the scheduler."""

    kind: str
    text: str
    after_ids: list[int] = field(default_factory=list)  # starts behind these ids (end of reasoning); empty: at once


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
    top_k: int = 0  # 0 = all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    min_tokens: int = 0  # until so many, no stop id is drawn and no stop string ends the answer
    logprobs: int = -1  # -1: none; k: the chosen token's and the k most likely of each place
    prompt_logprobs: int = -1  # the same of the prompt's tokens but the first
    grammar: Grammar | None = None
    priority: int = 0  # more is sooner, under --schedule-policy priority; and stays longer, under --eviction-policy priority
    lora: str = ""  # namespaces of the prefix cache: nothing is shared across them
    salt: str = ""
    embed: str = ""  # last or mean: the answer is one vector, max_new is 0
    include_stop: bool = False  # the stop string stays in the text
    keep_special: bool = False  # special tokens have text too (skip_special_tokens: false)
    spaces_between_special: bool = True


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
    min_tokens: int = 0
    include_stop: bool = False
    keep_special: bool = False
    spaces_between_special: bool = True
    serial: int = 0  # of this choice at the scheduler: a rid may come again, this does not


class TokenLogprob(Struct, array_like=True, frozen=True):
    """One place of an answer or prompt: its token, and the most likely ones (ids and logprobs, best first)."""

    token: int
    logprob: float
    top_ids: list[int] = field(default_factory=list)
    top: list[float] = field(default_factory=list)


class Sampled(Struct, array_like=True):
    """New tokens of one choice. `finish`: stop | length | None while it goes on. A stop id is not in `ids` but counts in `completion_tokens`."""

    rid: str
    index: int
    ids: list[int]
    completion_tokens: int
    finish: str | None = None
    cached_tokens: int = 0
    open: OpenText | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one per id of `ids`, if asked for
    prompt_logprobs: list[TokenLogprob] | None = None  # with the first token
    stop_id: int = -1  # the id that ended it, if one did
    queued_s: float = 0.0  # with the first token: seconds from arrival to the first step
    prefill_s: float = 0.0  # with the first token: seconds from the first step to it


class SampledBatch(_Message, tag="sampled"):
    """Scheduler -> detokenizer: all new tokens of one step."""

    items: list[Sampled]


class Text(Struct, array_like=True):
    """New text of one choice. Texts of a choice, joined, are the decoded answer. `finish` makes it terminal. `logprobs` go with `ids`."""

    rid: str
    index: int
    text: str
    ids: list[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    finish: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] | None = None
    stopped_by: str | int | None = None  # the stop string or stop id that ended it
    queued_s: float = 0.0  # as in Sampled
    prefill_s: float = 0.0


class TextBatch(_Message, tag="text"):
    """Detokenizer -> http. An item with empty text and no finish is still sent for the first token (it ends the wait for it)."""

    items: list[Text]


class Stopped(_Message, tag="stopped"):
    """Detokenizer or http -> scheduler: this choice is complete, though the model would go on; the scheduler ends it as by a stop id.

    From the detokenizer a stop string was met, and the terminal `Text` is sent already: the scheduler's own is dropped there. From http what may
    be shown is over (the one tool call), and the terminal `Text` still comes.
    """

    rid: str
    index: int
    serial: int = 0  # of `OpenText`; 0, from http: the choice that is there, since what http sends stays in order


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


class Embedded(_Message, tag="embedded"):
    """Scheduler -> detokenizer -> http, terminal of an embedding: `vector` is little-endian float32, not normalised."""

    rid: str
    index: int
    vector: bytes
    prompt_tokens: int
    cached_tokens: int = 0


class Control(_Message, tag="control"):
    """Http -> scheduler: a call of an operator or router. op: flush_cache, pause, continue, log_level, profile, internals.
    Answered by one `ControlReply` of the same id."""

    id: str
    op: str
    args: dict[str, int | float | str | bool] = field(default_factory=dict)


class ControlReply(_Message, tag="control_reply"):
    """Scheduler -> detokenizer -> http. status: an HTTP status; `data` is JSON, an error body's fields where status is not 200."""

    id: str
    status: int
    data: bytes = b"{}"


Message = (
    Ready | Peers | PeerDied | Drain | Admit | Abort | RoomRejected | SampledBatch | TextBatch | Stopped | Failed | HandedOver
    | Embedded | Control | ControlReply
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Bytes of one ZMQ frame."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Inverse of `encode`. Raises msgspec.DecodeError: both ends are of one version, so that is a bug."""
    return _decoder.decode(data)
