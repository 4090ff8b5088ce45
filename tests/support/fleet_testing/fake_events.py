"""A scripted publisher of KV events on 127.0.0.1, in the words of our runtime, of vLLM or of SGLang; on the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

from fleet_contract.kv_events import END_SEQUENCE, SNAPSHOT_START, decode_sequence, encode_sequence, epoch_of, kv_topic
from fleet_contract.prefix import chain_hashes, namespace_hash
from fleet_contract.worker import WorkerRecord
from fleet_testing.fake_worker import FakeWorker

OURS, VLLM, OLD_VLLM, SGLANG = DIALECTS = ("ours", "vllm", "old-vllm", "sglang")
BEAT_S: Final = 0.2


class FakePublisher:
    """Holds the prompts it was told to store; `lose` drops that many live messages."""

    def __init__(self, worker: FakeWorker, dialect: str = OURS, *, block_size: int = 16, can_replay: bool = True) -> None:
        self.worker = worker
        self.dialect = dialect
        self.block_size = block_size if dialect != OURS else 16
        self.lose = 0
        self.questions: list[int] = []
        self.silent = False
        self._context = zmq.asyncio.Context()
        self._pub, self._router = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        for socket in (self._pub, self._router):
            socket.setsockopt(zmq.LINGER, 0)
        events = self._pub.bind_to_random_port("tcp://127.0.0.1")
        replay = self._router.bind_to_random_port("tcp://127.0.0.1")
        ports = msgspec.structs.replace(worker.record.ports, events=events, replay=replay if can_replay else 0)
        incarnation = worker.record.incarnation if dialect == OURS else ""
        worker.record = msgspec.structs.replace(worker.record, ports=ports, incarnation=incarnation)
        self._log: list[bytes] = []
        self._held: list[Any] = []  # events that a snapshot repeats
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> FakePublisher:
        loop = asyncio.get_running_loop()
        work = [self._answer(), self._beat()] if self.dialect == OURS else [self._answer()]
        self._tasks = [loop.create_task(w) for w in work]
        await self.publish(self.cleared())
        return self

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._context.destroy(linger=0)

    async def restart(self) -> None:
        """A new life of the worker behind the same ports."""
        self.worker.restart()
        self._log.clear()
        self._held.clear()
        await self.publish(self.cleared())

    async def store(self, prompt: list[int]) -> None:
        """A whole prompt, from its root."""
        event = self.stored(prompt)
        self._held.append(event)
        await self.publish(event)

    async def publish(self, *events: Any) -> None:
        payload = self._payload(list(events))
        self._log.append(payload)
        if self.lose:
            self.lose -= 1
        else:
            await self._pub.send_multipart([self._topic(), encode_sequence(len(self._log) - 1), payload])

    def _topic(self) -> bytes:
        record: WorkerRecord = self.worker.record
        return kv_topic(record.pod_uid, record.model_revision) if self.dialect == OURS else b"kv-events"

    def _payload(self, events: list[Any]) -> bytes:
        return msgspec.msgpack.encode([time.time(), events] if self.dialect == SGLANG else [time.time(), events, 0])

    def _engine_hash(self, key: int) -> Any:
        match self.dialect:
            case "ours":
                return key
            case "vllm":
                return (key ^ 1).to_bytes(32, "big")
            case "old-vllm":
                return key ^ 1
        return (key ^ 1) - (1 << 64) if key >> 63 else key ^ 1  # SGLang: signed

    def stored(self, prompt: list[int]) -> Any:
        """A BlockStored of the dialect, for all whole blocks."""
        size = self.block_size
        keys = chain_hashes(prompt, namespace_hash(self.worker.record.model_revision))[size // 16 - 1 :: size // 16]
        hashes, tokens = [self._engine_hash(k) for k in keys], prompt[: len(keys) * size]
        if self.dialect in (OLD_VLLM, SGLANG):
            return ["BlockStored", hashes, None, tokens, size, None, "GPU"]
        event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None, "token_ids": tokens, "block_size": size, "medium": "GPU"}
        if self.dialect == OURS:
            event |= {"seq_hashes": keys, "base_block_idx": 0, "epoch": epoch_of(self.worker.record.incarnation)}
        return event | {"a_new_field": [1]}

    def removed(self, prompt: list[int]) -> Any:
        event = self.stored(prompt)
        hashes = event[1] if isinstance(event, list) else event["block_hashes"]
        return ["BlockRemoved", hashes, "GPU"] if isinstance(event, list) else {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"}

    def cleared(self) -> Any:
        if self.dialect in (OLD_VLLM, SGLANG):
            return ["AllBlocksCleared"]
        epoch = {"epoch": epoch_of(self.worker.record.incarnation)} if self.dialect == OURS else {}
        return {"type": "AllBlocksCleared"} | epoch

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            if not self.silent:
                await self.publish()

    async def _answer(self) -> None:
        while True:
            identity, empty, start = await self._router.recv_multipart()
            first = decode_sequence(start)
            self.questions.append(first)
            messages = [(n, payload) for n, payload in enumerate(self._log) if n >= first]
            if first == SNAPSHOT_START and self.dialect == OURS:
                messages = [(len(self._log) - 1, self._payload([event])) for event in self._held] or [(len(self._log) - 1, self._payload([]))]
            for n, payload in [*messages, (END_SEQUENCE, b"")]:
                topic = [self._topic()] if self.dialect in (OURS, VLLM) else []
                await self._router.send_multipart([identity, empty, *topic, encode_sequence(n), payload])
