"""A scripted SGLang: its native endpoints, abort by rid, and prefill and decode servers that meet in a bootstrap room.

Each side pins blocks while it works on a room. When one side fails or is aborted, the other fails too; both free what they hold.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from fleet_testing.engines.server import FakeEngine, Output, Refused, num_blocks, prompt_text
from fleet_testing.fake_worker import Received


@dataclass(eq=False)
class Room:
    """One meeting."""

    joined: asyncio.Event = field(default_factory=asyncio.Event)  # by the decode
    done: asyncio.Event = field(default_factory=asyncio.Event)  # the KV is there, or never will be
    prompt: str | None = None
    failed: bool = False

    def fail(self) -> None:
        self.failed = True
        self.joined.set()
        self.done.set()


@dataclass(eq=False)
class Rooms:
    """All meetings of one test, by prefill address and room."""

    rooms: dict[tuple[str, int, int], Room] = field(default_factory=dict)
    seen: list[tuple[str, int, int, str]] = field(default_factory=list)  # with the side

    def enter(self, body: dict[str, Any], side: str) -> Room:
        key = (body["bootstrap_host"], body["bootstrap_port"], body["bootstrap_room"])
        assert (*key, side) not in self.seen, f"room {key} is used again"
        assert 0 <= key[2] < 2**63
        self.seen.append((*key, side))
        return self.rooms.setdefault(key, Room())


@dataclass(eq=False)
class FakeSglang(FakeEngine):
    """One `sglang.launch_server`."""

    mode: str = "null"
    rooms: Rooms = field(default_factory=Rooms)
    aborted: list[str] = field(default_factory=list)
    dp_size: int = 1
    bootstrap_port: int = 8998
    is_new: bool = False  # only the newer names of its endpoints
    load: dict[str, int] = field(default_factory=lambda: {"num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0})
    _tasks: dict[str, asyncio.Task[Any]] = field(default_factory=dict)

    scheme = "sglang"

    def error_body(self, status: int, text: str) -> bytes:
        return json.dumps({"object": "error", "message": text, "type": "BadRequestError", "param": None, "code": status}).encode()

    def simple(self, request: Received) -> tuple[int, bytes, str] | None:
        info = {
            "model_path": "/models/tiny", "served_model_name": self.served, "page_size": 16, "dp_size": self.dp_size, "max_total_num_tokens": 65536,
            "max_running_requests": 64, "context_length": 4096, "disaggregation_mode": self.mode, "version": "0.5.18",
            "disaggregation_bootstrap_port": self.bootstrap_port, "internal_states": [{}],
        }  # fmt: skip
        answers: dict[str, Any] = {
            "/server_info" if self.is_new else "/get_server_info": info,
            "/model_info" if self.is_new else "/get_model_info": {"model_path": "/models/tiny", "is_generation": True},
            "/v1/loads" if self.is_new else "/get_load": {"loads": [self._load()]} if self.is_new else [self._load()],
        }
        if request.path == "/health":
            return self.health, b"", "text/plain"
        if request.path in answers:
            return 200, json.dumps(answers[request.path]).encode(), "application/json"
        if request.path == "/abort_request":
            rid = json.loads(request.body)["rid"]
            self.aborted.append(rid)
            for known, task in list(self._tasks.items()):
                if known.startswith(rid):
                    task.cancel()
            return 200, b"", "text/plain"
        if request.method == "POST" and request.path in ("/v1/chat/completions", "/v1/completions"):
            return None
        return 404, b'{"detail":"Not Found"}', "application/json"

    def _load(self) -> dict[str, int]:
        if not self.is_new:
            return {"dp_rank": 0, **self.load}
        running = self.load["num_reqs"] - self.load["num_waiting_reqs"]
        return {
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": self.load["num_waiting_reqs"],
            "num_used_tokens": self.load["num_tokens"],
        }

    async def work(self, body: dict[str, Any], request: Received, out: Output) -> None:
        rid = body["rid"]
        assert rid not in self._tasks
        task = asyncio.current_task()
        assert task is not None
        self._tasks[rid] = task
        try:
            prompt = prompt_text(body)
            if self.mode == "null":
                await self.phase("prefill", self.timing.prefill_s)
                await out.say(prompt, cached=self.cached_tokens(prompt))
                return
            room = self.rooms.enter(body, self.mode)
            self.pinned[rid] = num_blocks(prompt)
            try:
                await (self._prefill if self.mode == "prefill" else self._decode)(prompt, room, out)
            except BaseException:
                room.fail()
                raise
            finally:
                self.pinned.pop(rid, None)
        finally:
            del self._tasks[rid]

    async def _prefill(self, prompt: str, room: Room, out: Output) -> None:
        await self.phase("bootstrap", 0)
        await room.joined.wait()
        await self.phase("prefill", self.timing.prefill_s)
        await self.phase("transfer", self.timing.transfer_s)
        if room.failed:
            raise Refused(500, "Decode transfer failed")
        room.prompt = prompt
        room.done.set()
        out.body = {**out.body, "max_tokens": 1, "max_completion_tokens": 1}  # whatever was asked for, it makes one
        await out.say(prompt, cached=16)

    async def _decode(self, prompt: str, room: Room, out: Output) -> None:
        if out.is_stream:
            await out.begin()  # its status line comes before its first token
        await self.phase("prealloc", 0)
        room.joined.set()
        await self.phase("waiting", 0)
        await room.done.wait()
        if room.failed:
            raise Refused(500, "KVTransferError: Failed to get kvcache from prefill instance, it might be dead")
        assert room.prompt == prompt, "the decode got another request's KV"
        await out.say(room.prompt)
