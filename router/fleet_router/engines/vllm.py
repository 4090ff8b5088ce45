"""vLLM: /health, /v1/models, /version, /metrics; aborted by closing the connection. Prefill and decode meet by NIXL or Mooncake.

Sources: vLLM's OpenAI server and metrics documentation; for the hand-overs the fields that its NixlConnector and MooncakeConnector
read from `kv_transfer_params`, as in docs/design of its disaggregated serving examples.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from fleet_contract import names
from fleet_contract.errors import ApiError
from fleet_contract.worker import Ports, WorkerRecord
from fleet_router.api.dialects import OPENAI
from fleet_router.api.sse import event_json
from fleet_router.desk import Leg
from fleet_router.engines import openai_worker
from fleet_router.engines.base import Alone, Fetch, HandOver, Parts, PolledLoad, Sending, key_headers, post
from fleet_router.engines.openai_worker import count
from fleet_router.engines.prometheus import labels_of, total
from fleet_router.errors import UNDECODABLE
from fleet_router.table import WorkerView
from fleet_router.target import MOONCAKE, Target
from fleet_text.chat import Habits

RUNNING: Final = "vllm:num_requests_running"
WAITING: Final = "vllm:num_requests_waiting"
USAGE: Final = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")  # newer, older
CACHE: Final = "vllm:cache_config_info"
START_TIME: Final = "process_start_time_seconds"
_json: Final = msgspec.json.Decoder()


class Vllm:
    """See `base.Engine`."""

    kind = names.ENGINE_VLLM
    abort_path = ""
    flush_path = "/reset_prefix_cache"  # there with VLLM_SERVER_DEV_MODE=1 only
    wants_usage = True
    habits = Habits(
        part_break="\n", joins_turns=False, result_break="\n", tells_failures=False, keeps_tools=True, fills_content=True,
        effort_variables=("reasoning_effort", "enable_thinking"), unreadable=openai_worker.UNREADABLE,
    )  # fmt: skip

    async def trouble(self, fetch: Fetch) -> str:
        status, _ = await fetch("/health")
        return "" if status == 200 else f"/health answers {status}"

    async def record(self, fetch: Fetch, target: Target, known: WorkerRecord | None, life: str) -> WorkerRecord | None:
        status, said = await fetch("/v1/models")
        if status != 200:
            raise ApiError(502, f"/v1/models answers {status}: {said[:200].decode('utf-8', 'replace')}")
        models = _models(said)
        if not models:
            raise ApiError(502, "/v1/models names no model")
        _, version_said = await fetch("/version")
        _, metrics = await fetch("/metrics")
        version = str(_object(version_said).get("version", ""))
        served = [str(m["id"]) for m in models]
        capacity, page = _cache(metrics)
        started = total(metrics, START_TIME)
        revision, model_revision = openai_worker.revisions(self.kind, str(models[0].get("root") or served[0]), version, target.role, target.tokenizer)
        ports = Ports(data=target.port, internal=target.port, bootstrap=target.bootstrap, events=target.events, replay=target.replay)
        engine_ids: list[str] = []
        if target.transfer == MOONCAKE and target.role == names.ROLE_PREFILL:
            engine_ids = await _mooncake_engines(fetch, target)
        return WorkerRecord(
            engine=self.kind,
            pod_uid=target.key,
            incarnation=openai_worker.digest(target.key, started, version, life),
            ranks=max(1, len(engine_ids)),
            service=target.service or served[0],
            role=target.role,
            revision=target.revision or revision,
            model_revision=model_revision,
            served_names=served,
            page_size=page,
            kv_capacity_tokens=capacity or openai_worker.DEFAULT_CAPACITY_TOKENS,
            context_length=count(models[0], "max_model_len"),
            transfer_backends=[target.transfer] if target.transfer else [self.kind],
            ports=ports,
            engine_ids=engine_ids,
            tokenizer=target.tokenizer,
            key_env=target.key_env,
            adapters=[str(m["id"]) for m in models if m.get("parent") is not None],
        )

    async def load(self, fetch: Fetch, record: WorkerRecord) -> PolledLoad | None:
        status, metrics = await fetch("/metrics")
        running, waiting = total(metrics, RUNNING), total(metrics, WAITING)
        if status != 200 or running is None or waiting is None:
            return None
        used = max((total(metrics, name) or 0.0 for name in USAGE), default=0.0)
        return PolledLoad(int(running), int(waiting), int(min(1.0, used) * record.kv_capacity_tokens))

    def hand_over(self, sending: Sending) -> HandOver:
        lease = sending.lease
        if lease.prefill is None:
            return Alone(lease.serving, request(sending, lease.serving))
        openai_worker.check_pair_path(sending.parsed)
        if openai_worker.choices(sending.parsed) > 1:
            text = "n, best_of and lists of prompts need a vLLM worker that serves alone; send one request for each answer"
            raise ApiError(400, text, code="unsupported_by_pair", param="n")
        if MOONCAKE in lease.prefill.worker.record.transfer_backends:
            return MooncakeHandOver(sending)
        return NixlHandOver(sending)

    def abort_body(self, rid: str) -> bytes:
        return b""

    def error(self, status: int, body: bytes) -> ApiError:
        return openai_worker.error(status, body)

    def error_event(self, event: bytes) -> ApiError | None:
        return openai_worker.error_event(event_json(event)) if b'"error"' in event[:64] else None


class NixlHandOver:
    """Prefill first, for one token; what it says of its blocks goes to the decode, which reads them. Only that reading frees them early."""

    patient = True
    watches_transfer = True
    _ASKED: Final = (
        b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}'
    )

    def __init__(self, sending: Sending) -> None:
        self._sending = sending
        self._params: bytes | None = None  # of blocks that wait for the decode

    def first(self) -> list[tuple[Leg, Parts]]:
        leg = self._sending.lease.prefill
        assert leg is not None
        return [(leg, request(self._sending, leg, prefill_changes(self._sending) | {"kv_transfer_params": self._ASKED}))]

    def after_prefill(self, body: bytes, *, left: bool) -> Parts | None:
        params = _object(body).get("kv_transfer_params")
        self._params = msgspec.json.encode(params) if isinstance(params, dict) and params else None
        if left:
            return self.release(self._sending.lease.serving.worker)
        return request(self._sending, self._sending.lease.serving, {"kv_transfer_params": self._params} if self._params is not None else None)

    def cached(self, body: bytes) -> int | None:
        return OPENAI.cached_tokens(body)

    def release(self, worker: WorkerView) -> Parts | None:
        if self._params is None:
            return None
        return request(self._sending, Leg(worker, 0), prefill_changes(self._sending) | {"kv_transfer_params": self._params})


class MooncakeHandOver:
    """Both legs at once under one transfer id; the decode asks the prefill's bootstrap server where the engine is."""

    patient = True
    watches_transfer = True

    def __init__(self, sending: Sending) -> None:
        self._sending = sending

    def first(self) -> list[tuple[Leg, Parts]]:
        sending = self._sending
        prefill, decode = sending.lease.legs()
        record = prefill.worker.record
        transfer_id = f"xfer-{sending.rid}"
        rank = int(sending.rid[:8], 16) % max(1, len(record.engine_ids))
        asked = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        host = f"[{prefill.worker.host}]" if ":" in prefill.worker.host else prefill.worker.host
        given = {
            "do_remote_decode": False, "do_remote_prefill": True, "transfer_id": transfer_id,
            "remote_engine_id": record.engine_ids[rank] if record.engine_ids else "",
            "remote_bootstrap_addr": f"http://{host}:{record.ports.bootstrap}",
        }  # fmt: skip
        ranks = [("X-data-parallel-rank", str(rank))] if len(record.engine_ids) > 1 else []
        first = prefill_changes(sending) | {"kv_transfer_params": msgspec.json.encode(asked)}
        return [
            (prefill, request(sending, prefill, first, ranks)),
            (decode, request(sending, decode, {"kv_transfer_params": msgspec.json.encode(given)})),
        ]

    def after_prefill(self, body: bytes, *, left: bool) -> Parts | None:
        return None

    def cached(self, body: bytes) -> int | None:
        return OPENAI.cached_tokens(body)

    def release(self, worker: WorkerView) -> Parts | None:
        return None  # the prefill drops what nobody fetches by its own limit: the transfer id ended with the decode


def prefill_changes(sending: Sending) -> openai_worker.Changes:
    """One token, in one piece."""
    changes: openai_worker.Changes = {"max_tokens": b"1", "stream": b"false", "stream_options": None, "min_tokens": None}
    if "max_completion_tokens" in sending.parsed.fields:
        changes["max_completion_tokens"] = b"1"
    return changes


def request(sending: Sending, leg: Leg, changes: openai_worker.Changes | None = None, headers: list[tuple[str, str]] | None = None) -> Parts:
    """One leg. The id in vLLM's log begins with the client's and is never one of two requests."""
    ids = (names.HEADER_REQUEST_ID, f"{sending.request_id}-{sending.rid[:12]}")
    all_headers = [ids, *sending.parsed.passed_on, *key_headers(leg.worker.record.key_env), *(headers or [])]
    return post(leg, sending.parsed.path, all_headers, openai_worker.body(sending, leg, changes))


async def _mooncake_engines(fetch: Fetch, target: Target) -> list[str]:
    """Engine ids by rank, from the prefill's bootstrap server."""
    status, said = await fetch("/query", port=target.bootstrap)
    ranks = _object(said)
    if status != 200 or not ranks:
        raise ApiError(502, f"Mooncake's bootstrap server on port {target.bootstrap} answers {status} to /query")
    known = sorted((int(rank), entry) for rank, entry in ranks.items() if rank.isdigit() and isinstance(entry, dict))
    return [str(entry.get("engine_id", "")) for _, entry in known]


def _models(said: bytes) -> list[dict[str, Any]]:
    """Entries of /v1/models, base models first."""
    data = _object(said).get("data")
    found = [m for m in data if isinstance(m, dict) and isinstance(m.get("id"), str)] if isinstance(data, list) else []
    return sorted(found, key=lambda m: m.get("parent") is not None)


def _cache(metrics: bytes) -> tuple[int, int]:
    """Tokens of the KV cache over all engines of the server, and tokens of a block."""
    capacity, page = 0, names.PAGE_SIZE
    for labels in labels_of(metrics, CACHE):
        blocks, block = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
        if block.isdigit() and int(block):
            page = int(block)
        if blocks.isdigit():
            capacity += int(blocks) * page
    return capacity, page


def _object(said: bytes) -> dict[str, Any]:
    try:
        found = _json.decode(said)
    except UNDECODABLE:
        return {}
    return found if isinstance(found, dict) else {}
