"""What `make other-engines` checks: real vLLM servers for CPUs with KV events, and a real router in front of them.

A vLLM keeps its ports over a restart, as a pod behind a service would. Everything listens on loopback and ends with the stage.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
from safetensors.numpy import save_file

from fleet_bench.peers.servers import Kind, Server, free_port, vllm
from fleet_testing.router_process import RouterProcess, until_async

MODEL: Final = "bench"  # as `fleet_bench.peers.servers` names it
START_S: Final = 300.0  # a machine with other work on it
KEY_VARIABLE: Final = "RADIXFLEET_WORKER_KEY_CHECK"
KEY: Final = "a-key-of-the-check"
ADAPTER: Final = "poet"
RANK: Final = 8
# A template as models with tools have it: it goes through parts of a message, and knows tools, calls and reasoning.
TOOL_TEMPLATE: Final = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{%- if reasoning_effort is defined and reasoning_effort %}<|im_start|>effort {{ reasoning_effort }}<|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content is defined and message.reasoning_content %}<think>{{ message.reasoning_content }}</think>
{% endif %}{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}
{%- for call in message.tool_calls or [] %}
<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>{% endfor %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def folder_with_template(model: Path, folder: Path, template: str) -> Path:
    """The same model with another chat template."""
    folder.mkdir()
    for file in model.iterdir():
        if file.name != "chat_template.jinja":
            (folder / file.name).symlink_to(file.resolve())
    (folder / "chat_template.jinja").write_text(template)
    return folder


def adapter_folder(model: Path, folder: Path) -> Path:
    """A LoRA adapter of small random numbers, as PEFT writes one."""
    config = json.loads((model / "config.json").read_text())
    hidden, head = config["hidden_size"], config["hidden_size"] // config["num_attention_heads"]
    out = {"q_proj": hidden, "v_proj": head * config["num_key_value_heads"]}
    draw = np.random.default_rng(1)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in out.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = draw.normal(0, 0.02, (RANK, hidden)).astype(np.float32)
            tensors[f"{prefix}.lora_B.weight"] = draw.normal(0, 0.02, (width, RANK)).astype(np.float32)
    folder.mkdir()
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": list(out), "task_type": "CAUSAL_LM", "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@dataclass(eq=False)
class Vllm:
    """One `vllm serve` that publishes its KV events."""

    python: Path
    model: Path
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    events: int = field(default_factory=free_port)
    replay: int = field(default_factory=free_port)
    server: Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def target(self, **words: object) -> str:
        """For --static."""
        asked: dict[str, object] = {"events": self.events, "replay": self.replay, "tokenizer": self.model, **words}
        return f"vllm+{self.url}?" + "&".join(f"{k}={v}" for k, v in asked.items() if v)

    def start(self) -> None:
        """Begins; `until_up` waits."""
        events = {
            "enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv-events",
            # vLLM binds an address only when it holds * or ::, and this one is that of loopback.
            "endpoint": f"tcp://[::ffff:127.0.0.1]:{self.events}", "replay_endpoint": f"tcp://[::ffff:127.0.0.1]:{self.replay}",
        }  # fmt: skip
        base = vllm("vllm", self.python, str(self.model), eager=True, fresh=False)
        flags = ["--kv-events-config", json.dumps(events), *self.flags]
        environment = {**base.environment, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_HOST_IP": "127.0.0.1", **self.environment}
        kind: Kind = replace(base, argv=lambda *_: [*base.argv(self.port, 0), *flags], environment=environment)
        self.server = Server(kind)

    async def until_up(self) -> None:
        """Raises ServerFailed when it ends instead."""
        end = time.monotonic() + START_S
        async with httpx.AsyncClient(timeout=2.0, trust_env=False) as http:
            while True:
                assert self.server is not None
                self.server.check()
                try:
                    if (await http.get(f"{self.url}/health")).status_code == 200:
                        return
                except httpx.HTTPError:
                    pass
                assert time.monotonic() < end, f"vLLM did not start within {START_S:.0f} s"
                await asyncio.sleep(0.25)

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop()
            self.server = None


def nixl_pair(python: Path, model: Path, nixl: Path) -> tuple[Vllm, Vllm]:
    """A prefill and a decode that meet by NIXL over TCP on loopback. Args: nixl: folder of its packages."""

    def one(role: str) -> Vllm:
        transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
        environment = {
            "PYTHONPATH": str(nixl), "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            "UCX_TLS": "tcp,sm,self", "UCX_NET_DEVICES": "lo",
            # A thread of NIXL spins: bound to the one CPU of another server's worker it leaves that nothing, for minutes.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }  # fmt: skip
        return Vllm(python, model, ("--kv-transfer-config", json.dumps(transfer)), environment)

    return one("kv_producer"), one("kv_consumer")


class Stage:
    """Two vLLM servers and the router that the checks ask. `folder` is the stage's own."""

    def __init__(self, python: Path, model: Path, folder: Path, nixl: Path | None = None) -> None:
        """Args: nixl: folder of NIXL's packages, where they are."""
        self.folder = folder
        self.pair = nixl_pair(python, model, nixl) if nixl is not None else None
        self.with_tools = folder_with_template(model, folder / "with-tools", TOOL_TEMPLATE)
        self.plain = Vllm(python, model)
        template = str(self.with_tools / "chat_template.jinja")
        adapter = ("--enable-lora", "--max-lora-rank", str(RANK), "--lora-modules", f"{ADAPTER}={adapter_folder(model, folder / 'adapter')}")
        flags = (*adapter, "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--api-key", KEY, "--chat-template", template)
        self.tooled = Vllm(python, model, flags, {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0", "VLLM_SERVER_DEV_MODE": "1"})
        self.router: RouterProcess | None = None
        self.http = httpx.AsyncClient(timeout=120.0, trust_env=False)
        self._routers = 0

    async def begin(self) -> None:
        """One server after the other: two that start at once take twice as long on two cores."""
        os.environ[KEY_VARIABLE] = KEY  # the router that we start has it
        for one in (self.plain, self.tooled):
            one.start()
            await one.until_up()
        await self.front(self.plain.target(service="plain"))

    async def front(self, *targets: str, ready: int | None = None) -> RouterProcess:
        """A new router in front of these workers alone; the one before ends."""
        if self.router is not None:
            await self.router.stop()
            self.router = None
        folder = self.folder / f"router{self._routers}"
        self._routers += 1
        folder.mkdir()
        self.router = await RouterProcess.start(folder, "--poll-interval", "0.5", "--static", ",".join(targets), ready=False)
        await self.router.until_workers(len(targets) if ready is None else ready)
        if all("tokenizer=" in t for t in targets):
            await self.router.until_reads_prompts(MODEL)
        await self.until_live()
        return self.router

    async def until_live(self) -> None:
        """Every stream of KV events is believed."""

        async def live() -> bool:
            return all(w["events"]["trust"] in ("live", "none") for w in await self.workers())

        await until_async(live, "the streams of KV events are believed")

    # -- asking

    async def ask(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Through the router."""
        assert self.router is not None
        return await self.http.post(self.router.url + path, json={"model": MODEL, **body})

    async def ask_itself(self, worker: Vllm, path: str, body: dict[str, Any]) -> httpx.Response:
        """Past the router."""
        return await self.http.post(worker.url + path, json={"model": MODEL, **body}, headers={"Authorization": f"Bearer {KEY}"})

    async def explain(self, body: dict[str, Any], path: str) -> dict[str, Any]:
        assert self.router is not None
        answer = await self.http.post(f"{self.router.control}/debug/route", params={"path": path}, json={"model": MODEL, **body})
        told: dict[str, Any] = answer.json()
        return told

    async def workers(self) -> list[dict[str, Any]]:
        assert self.router is not None
        found: list[dict[str, Any]] = (await self.router.get("/workers"))["workers"]
        return found

    async def running(self, worker: Vllm) -> float:
        """Requests that vLLM says it computes."""
        return await self.metric(worker, "vllm:num_requests_running")

    async def metric(self, worker: Vllm, name: str) -> float:
        """The sum of one of vLLM's metrics."""
        text = (await self.http.get(f"{worker.url}/metrics")).text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + "{"))

    async def end(self) -> None:
        await self.http.aclose()
        if self.router is not None:
            await self.router.stop()
        for one in (self.plain, self.tooled, *(self.pair or ())):
            await asyncio.to_thread(one.stop)
