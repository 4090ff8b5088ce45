"""What a worker says of itself: the record of `GET /worker`, its load reports, and what a router reports to the operator.

Readers ignore unknown fields, default missing ones, and keep enums as plain strings.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct, field

from fleet_contract import names


class Ports(Struct, rename="camel", frozen=True):
    """Ports of one rank, rank already added. 0 = not offered."""

    data: int = 0
    internal: int = 0
    bootstrap: int = 0
    transfer: int = 0
    events: int = 0
    replay: int = 0
    load: int = 0


class Profile(Struct, rename="camel", frozen=True):
    """Speed of a worker: where the router's load model starts from."""

    prefill_tokens_per_s: float = 0.0
    step_base_s: float = 0.0
    step_per_row_s: float = 0.0
    step_per_ctx_token_s: float = 0.0


class WorkerRecord(Struct, rename="camel", frozen=True):
    """Answer of `GET /worker` (internal port). For a worker of another engine the router makes it of what that engine tells."""

    schema: int = 1
    engine: str = names.ENGINE_OURS
    pod_uid: str = ""
    incarnation: str = ""  # 16 hex, minted by the scheduler process, also the epoch of its KV events
    rank: int = 0
    ranks: int = 1
    namespace: str = ""
    service: str = ""
    role: str = "unified"
    revision: str = ""
    model_revision: str = ""  # 16 hex
    served_names: list[str] = field(default_factory=list)
    page_size: int = 16
    kv_capacity_tokens: int = 0
    max_rows: int = 0
    context_length: int = 0
    transfer_backends: list[str] = field(default_factory=list)
    ports: Ports = Ports()
    profile: Profile = Profile()
    # Of other engines only.
    engine_ids: list[str] = field(default_factory=list)  # by data-parallel rank, where the hand-over names the sender (Mooncake)
    tokenizer: str = ""  # folder with the model's tokenizer, on the router's machine
    key_env: str = ""  # environment variable of the router that holds the worker's API key
    adapters: list[str] = field(default_factory=list)  # those served names that are LoRA adapters: their prefixes are their own


class Seen(Struct, rename="camel"):
    """Which picks of one router a load report already holds: all up to `up_to` but those in `missing`."""

    up_to: int = -1
    missing: list[int] = field(default_factory=list)


class LoadReport(Struct, rename="camel"):
    """One load report of a worker (PUB socket, msgpack)."""

    incarnation: str = ""
    rank: int = 0
    seq: int = 0
    pend: int = 0  # uncached prompt tokens that wait
    run: int = 0  # rows
    ctx: int = 0  # tokens of context of the running rows
    kv_used: int = 0  # tokens held by requests or the tree
    kv_capacity: int = 0  # tokens
    draining: bool = False
    seen: dict[str, Seen] = field(default_factory=dict)


def load_topic(pod_uid: str) -> bytes:
    """Topic frame of a worker's load reports."""
    return f"load@{pod_uid}".encode()


class PrefillAnswer(Struct, frozen=True):
    """200 body of a prefill leg, sent after the transfer succeeded."""

    rid: str = ""
    cached_tokens: int = 0
    prompt_tokens: int = 0


class AbortRequest(Struct, frozen=True):
    """Body of `POST /abort_request`: the exact rid."""

    rid: str = ""


class AbortAnswer(Struct, frozen=True):
    """aborted: accepted, the request will end; finished: it had ended; unknown: remembered for 60 s."""

    state: str = "unknown"


class FleetWorker(Struct, rename="camel"):
    """One worker in a router's table."""

    pod_uid: str = ""
    pod: str = ""
    role: str = ""
    rank: int = 0
    state: str = "failed"  # starting ready draining stalled failed
    inflight: int = 0
    drain_deadline: str | None = None  # echo of the pod's draining annotation


class FleetRevision(Struct, rename="camel"):
    """One revision of a service in a router's table."""

    weight: int = 0
    queued: int = 0
    workers: list[FleetWorker] = field(default_factory=list)


class FleetReport(Struct, rename="camel"):
    """Answer of `GET /fleet/<ns>/<name>` on a router's control port."""

    router_id: str = ""
    synced: bool = False
    observed_generation: int = 0
    revisions: dict[str, FleetRevision] = field(default_factory=dict)


class ProbeRequest(Struct, frozen=True):
    """Body of `POST /fleet/<ns>/<name>/probe`."""

    revision: str = ""


class ProbeAnswer(Struct, rename="camel", frozen=True):
    """Always sent with status 200."""

    ok: bool = False
    error: str | None = None
    ttft_ms: float | None = None


class StartFailure(Struct, frozen=True):
    """The termination message of a worker that could not start."""

    reason: str = "Internal"
    message: str = ""


def decode_start_failure(text: str) -> StartFailure | None:
    """Reads a termination message; None when it is not ours."""
    try:
        return msgspec.json.decode(text.encode(), type=StartFailure)
    except msgspec.DecodeError:
        return None
