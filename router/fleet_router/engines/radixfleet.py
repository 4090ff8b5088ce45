"""Our own runtime: token ids in binary, rooms in headers, both legs at once, load reports of its own. Contract: docs/contract.md section 4."""

from __future__ import annotations

import msgspec

from fleet_contract import names
from fleet_contract.errors import ApiError
from fleet_contract.wire import RoutedHeaders, routed_alone
from fleet_contract.worker import AbortRequest, PrefillAnswer, WorkerRecord
from fleet_router.desk import Leg
from fleet_router.engines.base import Alone, Fetch, HandOver, Parts, PolledLoad, Sending, post
from fleet_router.engines.rooms import ROOMS
from fleet_router.errors import UNDECODABLE
from fleet_router.table import WorkerView
from fleet_router.target import Target
from fleet_text.chat import OURS


class Radixfleet:
    """See `base.Engine`."""

    kind = names.ENGINE_OURS
    abort_path = "/abort_request"
    flush_path = "/flush_cache"
    wants_usage = False
    habits = OURS

    async def trouble(self, fetch: Fetch) -> str:
        status, body = await fetch("/readyz")
        return "" if status == 200 else f"/readyz answers {status}: {body[:200].decode('utf-8', 'replace')}"

    async def record(self, fetch: Fetch, target: Target, known: WorkerRecord | None, life: str) -> WorkerRecord | None:
        status, body = await fetch("/worker")
        if status != 200:
            return known
        record = msgspec.json.decode(body, type=WorkerRecord)
        return msgspec.structs.replace(record, engine=self.kind, ports=msgspec.structs.replace(record.ports, internal=target.port))

    async def load(self, fetch: Fetch, record: WorkerRecord) -> PolledLoad | None:
        return None

    def hand_over(self, sending: Sending) -> HandOver:
        lease = sending.lease
        if lease.prefill is None:
            return Alone(lease.serving, request(sending, lease.serving, ()))
        return RoomsHandOver(sending)

    def abort_body(self, rid: str) -> bytes:
        return msgspec.json.encode(AbortRequest(rid))

    def error(self, status: int, body: bytes) -> ApiError:
        return ApiError.from_body(status, body)

    def error_event(self, event: bytes) -> ApiError | None:
        return None  # it sends no status line before its first token


class RoomsHandOver:
    """Both legs at once, with one room per choice."""

    patient = False
    watches_transfer = False  # the workers do

    def __init__(self, sending: Sending) -> None:
        self._sending = sending

    def first(self) -> list[tuple[Leg, Parts]]:
        rooms = ROOMS.take(self._sending.prompt.choices)
        return [(leg, request(self._sending, leg, rooms)) for leg in self._sending.lease.legs()]

    def after_prefill(self, body: bytes, *, left: bool) -> Parts | None:
        return None

    def cached(self, body: bytes) -> int | None:
        try:
            return msgspec.json.decode(body, type=PrefillAnswer).cached_tokens
        except UNDECODABLE:
            return None

    def release(self, worker: WorkerView) -> Parts | None:
        return None


def request(sending: Sending, leg: Leg, rooms: tuple[int, ...]) -> Parts:
    """The client's JSON as it came, with token ids behind it when we have them."""
    headers = [(names.HEADER_REQUEST_ID, sending.request_id), *sending.parsed.passed_on, *_routed(sending, leg, rooms)]
    body, ids = sending.parsed.body, sending.prompt.ids
    if ids is None:
        return post(leg, sending.parsed.path, headers, body)
    headers += [(names.HEADER_JSON_LENGTH, str(len(body))), (names.HEADER_MODEL_REVISION, leg.worker.record.model_revision)]
    return post(leg, sending.parsed.path, headers, body, names.CONTENT_TYPE_IDS, ids)


def _routed(sending: Sending, leg: Leg, rooms: tuple[int, ...]) -> list[tuple[str, str]]:
    """What the router tells a worker beside the client's request."""
    prefill = sending.lease.prefill
    if prefill is None:
        return routed_alone(sending.rid, sending.lease.pick_id, leg.pick_number, sending.deadline_ms)
    return RoutedHeaders(
        rid=sending.rid,
        pick=(sending.lease.pick_id, leg.pick_number),
        deadline_ms=sending.deadline_ms,
        leg=names.ROLE_PREFILL if leg is prefill else names.ROLE_DECODE,
        rooms=rooms,
        bootstrap=f"{prefill.worker.host}:{prefill.worker.record.ports.bootstrap}",
        prefill_incarnation=prefill.worker.record.incarnation,
    ).items()
