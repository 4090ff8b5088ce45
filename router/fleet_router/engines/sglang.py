"""SGLang: /health, /get_server_info, /get_model_info, /get_load and their newer names; aborted by the `rid` in the body.

Prefill and decode meet by `bootstrap_host`, `bootstrap_port` and `bootstrap_room` in both bodies, sent at once. Source: SGLang's native
API documentation and its prefill/decode disaggregation guide.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from fleet_contract import names
from fleet_contract.errors import ApiError
from fleet_contract.worker import AbortRequest, Ports, WorkerRecord
from fleet_router.api.dialects import OPENAI
from fleet_router.api.sse import event_json
from fleet_router.desk import Leg
from fleet_router.engines import openai_worker
from fleet_router.engines.base import Alone, Fetch, HandOver, Parts, PolledLoad, Sending, key_headers, post
from fleet_router.engines.openai_worker import count
from fleet_router.engines.rooms import ROOMS
from fleet_router.table import WorkerView
from fleet_router.target import Target
from fleet_text.chat import Habits

# Paths, older name first; a server that does not have one answers 404.
SERVER_INFO: Final = ("/get_server_info", "/server_info")
MODEL_INFO: Final = ("/get_model_info", "/model_info")
LOAD: Final = ("/get_load", "/v1/loads")
_MODES: Final = {"prefill": names.ROLE_PREFILL, "decode": names.ROLE_DECODE}
_json: Final = msgspec.json.Decoder()


class Sglang:
    """See `base.Engine`."""

    kind = names.ENGINE_SGLANG
    abort_path = "/abort_request"
    flush_path = "/flush_cache"
    wants_usage = True
    habits = Habits(
        part_break=" ", joins_turns=False, result_break="\n", tells_failures=False, fills_content=True, effort_variables=("reasoning_effort",),
        unreadable=openai_worker.UNREADABLE,
    )  # fmt: skip

    async def trouble(self, fetch: Fetch) -> str:
        status, _ = await fetch("/health")
        return "" if status == 200 else f"/health answers {status}"

    async def record(self, fetch: Fetch, target: Target, known: WorkerRecord | None, life: str) -> WorkerRecord | None:
        info, model = await _first(fetch, SERVER_INFO), await _first(fetch, MODEL_INFO)
        if not isinstance(info, dict):
            raise ApiError(502, f"{SERVER_INFO[0]} answers no JSON object")
        path = str((model.get("model_path") if isinstance(model, dict) else "") or info.get("model_path") or "")
        served = str(info.get("served_model_name") or path)
        if not served:
            raise ApiError(502, f"{SERVER_INFO[0]} and {MODEL_INFO[0]} name no model")
        role = _role(target, info)
        version = str(info.get("version", ""))
        ranks = max(1, count(info, "dp_size"))
        revision, model_revision = openai_worker.revisions(self.kind, path or served, version, role, target.tokenizer)
        bootstrap = 0
        if role == names.ROLE_PREFILL:
            bootstrap = target.bootstrap or count(info, "disaggregation_bootstrap_port") or names.RUNTIME_BOOTSTRAP_PORT
        return WorkerRecord(
            engine=self.kind,
            pod_uid=target.key,
            incarnation=openai_worker.digest(target.key, version, life),
            ranks=ranks,
            service=target.service or served,
            role=role,
            revision=target.revision or revision,
            model_revision=model_revision,
            served_names=[served],
            page_size=max(1, count(info, "page_size")),
            kv_capacity_tokens=count(info, "max_total_num_tokens") * ranks or openai_worker.DEFAULT_CAPACITY_TOKENS,
            max_rows=count(info, "max_running_requests"),
            context_length=count(info, "context_length") or count(info, "max_req_input_len"),
            transfer_backends=[self.kind],
            ports=Ports(data=target.port, internal=target.port, bootstrap=bootstrap, events=target.events, replay=target.replay),
            tokenizer=target.tokenizer,
            key_env=target.key_env,
        )

    async def load(self, fetch: Fetch, record: WorkerRecord) -> PolledLoad | None:
        said = await _first(fetch, LOAD)
        ranks = said.get("loads") if isinstance(said, dict) else said
        if not isinstance(ranks, list):
            return None
        waiting = sum(count(r, "num_waiting_reqs") for r in ranks)
        running = sum(count(r, "num_running_reqs") or max(0, count(r, "num_reqs") - count(r, "num_waiting_reqs")) for r in ranks)
        return PolledLoad(running, waiting, sum(count(r, "num_used_tokens") or count(r, "num_tokens") for r in ranks))

    def hand_over(self, sending: Sending) -> HandOver:
        lease = sending.lease
        if lease.prefill is None:
            return Alone(lease.serving, request(sending, lease.serving))
        openai_worker.check_pair_path(sending.parsed)
        return BootstrapHandOver(sending)

    def abort_body(self, rid: str) -> bytes:
        return msgspec.json.encode(AbortRequest(rid))

    def error(self, status: int, body: bytes) -> ApiError:
        return openai_worker.error(status, body)

    def error_event(self, event: bytes) -> ApiError | None:
        return openai_worker.error_event(event_json(event)) if b'"error"' in event[:64] else None


class BootstrapHandOver:
    """Both legs at once in one room; n choices take n rooms in sequence, as the engine counts them itself."""

    patient = False  # an abort by rid frees both sides
    watches_transfer = True

    def __init__(self, sending: Sending) -> None:
        self._sending = sending

    def first(self) -> list[tuple[Leg, Parts]]:
        prefill = self._sending.lease.prefill
        assert prefill is not None
        worker = prefill.worker
        room = ROOMS.take(openai_worker.choices(self._sending.parsed), dp_size=worker.record.ranks)[0]
        meeting: openai_worker.Changes = {
            "bootstrap_host": msgspec.json.encode(worker.host),
            "bootstrap_port": b"%d" % worker.record.ports.bootstrap,
            "bootstrap_room": b"%d" % room,
        }
        whole: openai_worker.Changes = {"stream_options": None}  # nobody reads the prefill's answer as a stream
        if "stream" in self._sending.parsed.fields:
            whole["stream"] = b"false"
        serving = self._sending.lease.serving
        return [(prefill, request(self._sending, prefill, meeting | whole)), (serving, request(self._sending, serving, meeting))]

    def after_prefill(self, body: bytes, *, left: bool) -> Parts | None:
        return None

    def cached(self, body: bytes) -> int | None:
        return OPENAI.cached_tokens(body)

    def release(self, worker: WorkerView) -> Parts | None:
        return None


def request(sending: Sending, leg: Leg, changes: openai_worker.Changes | None = None) -> Parts:
    """One leg; its `rid` is ours, so that an abort hits nobody else's."""
    headers = [(names.HEADER_REQUEST_ID, sending.request_id), *sending.parsed.passed_on, *key_headers(leg.worker.record.key_env)]
    return post(leg, sending.parsed.path, headers, openai_worker.body(sending, leg, {"rid": b'"%b"' % sending.rid.encode(), **(changes or {})}))


def _role(target: Target, info: dict[str, Any]) -> str:
    """The server knows its own; the user may say it too."""
    told = _MODES.get(str(info.get("disaggregation_mode")), names.ROLE_UNIFIED)
    if target.role not in (names.ROLE_UNIFIED, told):
        raise ApiError(502, f"it is named with role={target.role}, but its disaggregation_mode makes it {told}")
    return told


async def _first(fetch: Fetch, paths: tuple[str, ...]) -> Any:
    """The JSON of the first of some paths that the server has. Raises ApiError."""
    status, said = 404, b""
    for path in paths:
        status, said = await fetch(path)
        if status != 404:
            break
    if status != 200:
        raise ApiError(502, f"{paths[0]} answers {status}: {said[:200].decode('utf-8', 'replace')}")
    return _json.decode(said)
