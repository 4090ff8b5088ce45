"""KV events as vLLM and SGLang put them on the wire: PUB with three frames, ROUTER for replay, events as arrays or as maps.

Fields and their order: those of `vllm/distributed/kv_events.py` and SGLang's copy of it, as listed in docs/contract.md section 5.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
import zmq
import zmq.asyncio

END = b"\xff" * 8
STORED_FIELDS = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")


class KvPublisher:
    """One rank's stream. `maps`: events and batch as maps (newer vLLM); else arrays (SGLang, older vLLM)."""

    def __init__(self, *, maps: bool, frames: int = 3, topic: bytes = b"kv-events") -> None:
        self.maps = maps
        self.frames = frames
        self.topic = topic
        self.sequence = 0
        self.kept: list[tuple[int, bytes]] = []
        self.asked: list[int] = []  # where each replay began
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        for socket in (self._pub, self._router):
            socket.setsockopt(zmq.LINGER, 0)
        self.port = self._pub.bind_to_random_port("tcp://127.0.0.1")
        self.replay_port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._replays = asyncio.ensure_future(self._serve())

    def stored(self, hashes: list[int | bytes], tokens: list[int], *, parent: int | bytes | None = None, block_size: int = 16) -> Any:
        values = (hashes, parent, tokens, block_size, None, "GPU", None)
        if not self.maps:
            return ["BlockStored", *values[:6]]
        more = {"extra_keys": [None] * len(hashes), "group_idx": 0, "kv_cache_spec_kind": "full_attention"}  # as vLLM 0.32 writes them
        return {"type": "BlockStored", **dict(zip(STORED_FIELDS, values, strict=True)), **more}

    def removed(self, hashes: list[int | bytes]) -> Any:
        return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"} if self.maps else ["BlockRemoved", hashes, "GPU"]

    def cleared(self) -> Any:
        return {"type": "AllBlocksCleared"} if self.maps else ["AllBlocksCleared"]

    def payload(self, *events: Any) -> bytes:
        batch: Any = {"ts": 1.5, "events": list(events), "data_parallel_rank": 0} if self.maps else [1.5, list(events)]
        return msgspec.msgpack.encode(batch)

    async def publish(self, *events: Any, lost: bool = False) -> int:
        """One batch; `lost`: kept for replay, but never on the live stream."""
        number, payload = self.sequence, self.payload(*events)
        self.sequence += 1
        self.kept.append((number, payload))
        if not lost:
            await self._pub.send_multipart([self.topic, number.to_bytes(8, "big"), payload])
        return number

    def restart(self) -> None:
        """A new life of the engine at the same ports: it counts from 0 and has kept nothing."""
        self.sequence = 0
        self.kept.clear()

    async def close(self) -> None:
        self._replays.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._replays
        self._pub.close()
        self._router.close()
        self._context.destroy(linger=0)

    async def _serve(self) -> None:
        while True:
            client, *rest = await self._router.recv_multipart()
            start = int.from_bytes(rest[-1], "big")
            self.asked.append(start)
            head = [client, b""] + ([self.topic] if self.frames == 3 else [])
            for number, payload in self.kept:
                if number >= start:
                    await self._router.send_multipart([*head, number.to_bytes(8, "big"), payload])
            await self._router.send_multipart([client, b"", *([b""] if self.frames == 3 else []), END, b""])  # vLLM names no topic there
