"""A scripted vLLM: its documented endpoints and metrics, and the two ways in which its prefill and decode servers meet.

NIXL: a prefill's blocks stay pinned until a decode has read them; a request that is aborted before it is finished pins nothing, one that
is finished pins until it is read. Mooncake: both know a transfer id; the decode waits until the prefill is done.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import dataclass, field
from typing import Any

from fleet_testing.engines.server import FakeEngine, Output, Refused, num_blocks, prompt_text
from fleet_testing.fake_worker import Received

_number = itertools.count()


@dataclass(eq=False)
class Transfers:
    """What the engines of one test can reach of one another."""

    engines: dict[str, FakeVllm] = field(default_factory=dict)
    held: dict[str, tuple[FakeVllm, str]] = field(default_factory=dict)  # by block list or transfer id: who, prompt
    ready: dict[str, asyncio.Event] = field(default_factory=dict)  # Mooncake: by transfer id

    def wait_for(self, transfer_id: str) -> asyncio.Event:
        return self.ready.setdefault(transfer_id, asyncio.Event())


@dataclass(eq=False)
class FakeVllm(FakeEngine):
    """One `vllm serve`."""

    transfers: Transfers = field(default_factory=Transfers)
    engine_id: str = ""
    capacity_blocks: int = 4096
    block_size: int = 16
    busy: tuple[int, int] = (0, 0)  # running and waiting of others
    version: str = "0.32.0"
    max_model_len: int = 4096
    bootstrap_port: int = 0
    adapters: tuple[str, ...] = ()
    reads: int = 0

    scheme = "vllm"

    async def start(self, port: int = 0) -> None:
        await super().start(port)
        self.engine_id = f"engine-{next(_number)}"
        self.transfers.engines[self.engine_id] = self
        bootstrap = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.bootstrap_port = bootstrap.sockets[0].getsockname()[1]
        self._servers.append(bootstrap)

    def error_body(self, status: int, text: str) -> bytes:
        return json.dumps({"error": {"message": text, "type": "BadRequestError", "param": None, "code": status}}).encode()

    def simple(self, request: Received) -> tuple[int, bytes, str] | None:
        match request.path:
            case "/health":
                return self.health, b"", "text/plain"
            case "/version":
                return 200, json.dumps({"version": self.version}).encode(), "application/json"
            case "/v1/models":
                base = {"id": self.served, "object": "model", "root": self.served, "parent": None, "max_model_len": self.max_model_len}
                more = [{"id": name, "object": "model", "root": f"/adapters/{name}", "parent": self.served} for name in self.adapters]
                return 200, json.dumps({"object": "list", "data": [base, *more]}).encode(), "application/json"
            case "/metrics":
                return 200, self.metrics().encode(), "text/plain; version=0.0.4"
            case "/query":
                entry = {"engine_id": self.engine_id, "worker_addr": {"0": {"0": "tcp://127.0.0.1:1"}}}
                return 200, json.dumps({"0": entry}).encode(), "application/json"
        if request.method == "POST" and request.path in ("/v1/chat/completions", "/v1/completions"):
            return None
        return 404, b'{"detail":"Not Found"}', "application/json"

    def metrics(self) -> str:
        """As prometheus_client writes them, histograms left out."""
        labels = f'engine="0",model_name="{self.served}"'
        running, waiting = self.busy
        used = self.pinned_blocks / self.capacity_blocks
        return (
            "# HELP process_start_time_seconds Start time of the process.\n# TYPE process_start_time_seconds gauge\n"
            "process_start_time_seconds 1.7e+09\n"
            f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{{{labels}}} {float(self.running + running)}\n"
            f"# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{{{labels}}} {float(waiting)}\n"
            f'vllm:num_requests_waiting_by_reason{{{labels},reason="capacity"}} {float(waiting)}\n'
            f"# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{{{labels}}} {used}\n"
            "# TYPE vllm:cache_config_info gauge\n"
            f'vllm:cache_config_info{{block_size="{self.block_size}",cache_dtype="auto",engine="0",'
            f'num_gpu_blocks="{self.capacity_blocks}",sliding_window="None"}} 1.0\n'
        )

    async def work(self, body: dict[str, Any], request: Received, out: Output) -> None:
        if body["model"] not in (self.served, *self.adapters):
            raise Refused(404, f"The model `{body['model']}` does not exist.")
        prompt = prompt_text(body)
        if (body.get("max_tokens") or 0) + len(prompt) // 4 > self.max_model_len:
            raise Refused(400, f"This model's maximum context length is {self.max_model_len} tokens.")
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode"):
            await self._prefill(prompt, params, out)
        elif params.get("do_remote_prefill"):
            await self._decode(prompt, params, out)
        else:
            await self.phase("prefill", self.timing.prefill_s)
            await out.say(prompt, cached=self.cached_tokens(prompt))

    async def _prefill(self, prompt: str, params: dict[str, Any], out: Output) -> None:
        assert out.body["max_tokens"] == 1
        assert not out.is_stream
        assert "stream_options" not in out.body
        await self.phase("prefill", self.timing.prefill_s)
        transfer = params.get("transfer_id") or f"{self.engine_id}-{next(_number)}"
        self.pinned[transfer] = num_blocks(prompt)
        self.transfers.held[transfer] = (self, prompt)
        if "transfer_id" in params:
            self.transfers.wait_for(transfer).set()
            await out.say(prompt, cached=16)
            return
        assert set(params) >= {"remote_engine_id", "remote_block_ids", "remote_host", "remote_port"}
        given = {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [transfer], "remote_engine_id": self.engine_id,
            "remote_host": "127.0.0.1", "remote_port": 5600,
        }  # fmt: skip
        await out.say(prompt, cached=16, extra={"kv_transfer_params": given})
        await self.phase("answered", 0)

    async def _decode(self, prompt: str, params: dict[str, Any], out: Output) -> None:
        if "transfer_id" in params:
            assert params["remote_bootstrap_addr"].startswith("http://127.0.0.1:")
            transfer = params["transfer_id"]
            await self.phase("waiting", 0)
            await self.transfers.wait_for(transfer).wait()
        else:
            transfer = params["remote_block_ids"][0]
        await self.phase("transfer", self.timing.transfer_s)
        owner, held = self.transfers.held.get(transfer, (None, ""))
        if owner is None or owner.dead or owner.engine_id != params["remote_engine_id"] or transfer not in owner.pinned:
            raise Refused(500, f"KV of {params['remote_engine_id']} could not be read")
        del owner.pinned[transfer]
        self.reads += 1
        assert held == prompt, "the decode got another request's KV"
        await out.say(held)
