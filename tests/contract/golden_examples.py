"""One example of each wire type. `python tests/contract/golden_examples.py` rewrites the golden files; a test compares."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from fleet_contract import errors, handoff, kv_events, prefix, worker

GOLDEN = Path(__file__).parent / "golden"
INCARNATION = "a1b2c3d4e5f60718"
RID = "0f" * 16
ROOM = 4611686018427387904

RECORD = worker.WorkerRecord(
    pod_uid="8f0c", incarnation=INCARNATION, namespace="demo", service="chat", role="prefill", revision="5f3a9c1e",
    model_revision="00aa11bb22cc33dd", served_names=["smollm2", "demo/chat"], kv_capacity_tokens=46000, max_rows=64, context_length=4096,
    transfer_backends=["tcp"], ports=worker.Ports(8000, 8001, 8998, 8999, 0, 0, 5757), profile=worker.Profile(630.0, 0.02, 0.001, 1e-6),
)  # fmt: skip
STORED = kv_events.BlockStored(
    block_hashes=[2**64 - 5, 6], parent_block_hash=None, token_ids=list(range(32)), block_size=16, medium="GPU", lora_name=None,
    extra_keys=[["s"], None], seq_hashes=[2**64 - 5, 6], base_block_idx=0, cache_salt="s", epoch=9,
)  # fmt: skip
JSON_EXAMPLES: dict[str, msgspec.Struct] = {
    "worker_record": RECORD,
    "fleet_report": worker.FleetReport(
        "r-7c1d", True, 3, {"5f3a9c1e": worker.FleetRevision(100, 0, [worker.FleetWorker("8f0c", "chat-5f3a9c1e-p-0", "prefill", 0, "ready", 1)])}
    ),
    "prefill_answer": worker.PrefillAnswer(RID, 496, 512),
    "abort_answer": worker.AbortAnswer("aborted"),
    "probe_answer": worker.ProbeAnswer(True, None, 84.0),
    "error": errors.ErrorEnvelope(errors.ErrorBody("too long", errors.INVALID_REQUEST, "context_length_exceeded", "messages", "req-1")),
    "start_failure": worker.StartFailure("ModelNotFound", "bundled://x: no such folder"),
    "route": handoff.Route(INCARNATION, "8f0c", 0, 1, "", 8999, ["tcp"]),
}
MSGPACK_EXAMPLES: dict[str, msgspec.Struct] = {
    "load_report": worker.LoadReport(INCARNATION, 0, 17, 512, 3, 900, 1400, 46000, False, {"r-7c1d": worker.Seen(41, [38, 40])}),
    "block_stored": STORED,
    "block_removed": kv_events.BlockRemoved(block_hashes=[2**64 - 5], medium="GPU", epoch=9),
    "all_cleared": kv_events.AllBlocksCleared(epoch=9),
    "kv_batch": kv_events.EventBatch(1764460800.5, [STORED, kv_events.AllBlocksCleared(epoch=9)], 0),
}
HANDOFF_EXAMPLES: dict[str, handoff.Handoff] = {
    "hello": handoff.Hello(INCARNATION, "8f0c", 0, 1, "00aa11bb22cc33dd", 16, 737280, "float32", 30, 3, 64, "page-major", "tcp"),
    "alloc": handoff.Alloc(ROOM, 1, INCARNATION, 2, [9, 10], 0),
    "queued": handoff.Queued(ROOM, 1),
    "pages": handoff.Pages(ROOM, 1, 0, 2, [1, 2]),
    "done": handoff.Done(ROOM, 1, 42, 7, 0, 60),
    "received": handoff.Received(ROOM, 1),
    "abort": handoff.Abort(ROOM, 1, "client gone"),
    "drained": handoff.Drained(ROOM, 1),
    "failed": handoff.Failed(ROOM, 1, 503, "server_error", "peer_failed", "x"),
    "ping": handoff.Ping(INCARNATION, 5, 900),
}


def rendered() -> dict[str, bytes]:
    """File name -> bytes of every golden file."""
    out = {f"{n}.json": msgspec.json.format(msgspec.json.encode(e), indent=1) + b"\n" for n, e in JSON_EXAMPLES.items()}
    packed = {n: msgspec.msgpack.encode(e) for n, e in MSGPACK_EXAMPLES.items()}
    packed |= {f"handoff_{n}": handoff.encode(m, payload_bytes=3 if n == "pages" else 0) for n, m in HANDOFF_EXAMPLES.items()}
    out |= {f"{n}.hex": data.hex().encode() + b"\n" for n, data in packed.items()}
    ids = list(range(40))
    namespaces = {"plain": ("00aa11bb22cc33dd", "", ""), "lora": ("00aa11bb22cc33dd", "l", ""), "salt": ("00aa11bb22cc33dd", "", "s")}
    keys = {name: [f"{h:016x}" for h in prefix.chain_hashes(ids, prefix.namespace_hash(*parts))] for name, parts in namespaces.items()}
    out["prefix_keys.json"] = json.dumps(keys, indent=1).encode() + b"\n"
    return out


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, data in rendered().items():
        (GOLDEN / name).write_bytes(data)
