"""A real `radixfleet-router` for a test: supervisor, edge and control as processes, ended by pid with everything they started."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from fleet_contract.names import ENV_COMPILED

LIMIT_S = 40.0


class RouterProcess:
    """`await RouterProcess.start(folder, "--static", url)`."""

    def __init__(self, process: subprocess.Popen[bytes], announced: dict[str, int], log: Path) -> None:
        self.process = process
        self.data_port = announced["dataPort"]
        self.control_port = announced["controlPort"]
        self.announced = announced
        self.log = log
        self.http = httpx.AsyncClient(timeout=30.0, trust_env=False)

    @classmethod
    async def start(cls, folder: Path, *flags: str, ready: bool = True) -> RouterProcess:
        """Starts on free ports of 127.0.0.1; waits until it is ready."""
        announce, log = folder / "announce.json", folder / "router.log"
        announce.unlink(missing_ok=True)
        argv = [sys.executable, "-m", "fleet_router", "--host", "127.0.0.1", "--control-host", "127.0.0.1"]
        argv += ["--data-port", "0", "--control-port", "0", "--announce", str(announce), *flags]
        process = spawn(argv, log)
        await until(lambda: announce.exists() or process.poll() is not None, "the router announces its ports")
        assert process.poll() is None, log.read_text()
        self = cls(process, json.loads(announce.read_text()), log)
        if ready:
            await until_async(self.is_ready, f"the router is ready\n{log}")
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.data_port}"

    @property
    def control(self) -> str:
        return f"http://127.0.0.1:{self.control_port}"

    def child(self, module: str) -> psutil.Process | None:
        """The child process that runs a module, e.g. `fleet_router.edge.edge`."""
        return next(iter(self.children(module)), None)

    def children(self, module: str) -> list[psutil.Process]:
        """All of them."""
        out = []
        for p in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if module in p.cmdline():
                    out.append(p)
            except psutil.Error:
                continue
        return out

    async def is_ready(self) -> bool:
        try:
            return (await self.http.get(f"{self.control}/readyz")).status_code == 200
        except httpx.HTTPError:
            return False

    async def get(self, path: str) -> Any:
        """JSON of the control port."""
        return (await self.http.get(self.control + path)).json()

    async def metrics(self) -> dict[str, float]:
        """All samples by name and labels."""
        text = (await self.http.get(f"{self.control}/metrics")).text
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {name.removeprefix("radixfleet_router_"): float(value) for name, value in lines}

    async def until_workers(self, ready: int) -> None:
        """Waits for so many ready workers."""

        async def enough() -> bool:
            found = await self.get("/workers")
            return sum(w["state"] == "ready" for w in found.get("workers", [])) == ready

        await until_async(enough, f"{ready} workers are ready")

    async def until_reads_prompts(self, model: str = "tiny") -> None:
        """Waits for a model's tokenizer: a prompt before it has keys of its bytes, which share none with keys of tokens."""

        async def reads() -> bool:
            told = await self.http.post(f"{self.control}/debug/route", json={"model": model, "prompt": "x"})
            return bool(told.json().get("tokenized"))

        await until_async(reads, "the tokenizer is here")

    async def until_idle(self, limit_s: float = LIMIT_S) -> None:
        """Waits until nothing is in flight."""

        async def idle() -> bool:
            return (await self.metrics()).get("inflight") == 0

        await until_async(idle, "nothing is in flight", limit_s)

    async def chat(self, text: str = "hi", **fields: Any) -> httpx.Response:
        """One chat request."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}
        return await self.http.post(f"{self.url}/v1/chat/completions", json=body)

    async def stop(self) -> int:
        """SIGTERM, and waits; kills what does not end."""
        await self.http.aclose()
        return await asyncio.to_thread(self._end)

    def _end(self) -> int:
        children = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.kill(self.process.pid, signal.SIGKILL)
            code = self.process.wait(LIMIT_S)
        _, alive = psutil.wait_procs(children, timeout=5)
        assert not alive, f"left behind: {alive}"
        return code


@contextmanager
def held_port() -> Iterator[int]:
    """A port of 127.0.0.1 on which nobody listens yet, and that nobody else is given meanwhile."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("127.0.0.1", 0))
        yield s.getsockname()[1]


def spawn(argv: list[str], log: Path) -> subprocess.Popen[bytes]:
    """A process in a session of its own; its output goes to the log."""
    with log.open("ab") as out:
        return subprocess.Popen(argv, stdout=out, stderr=out, start_new_session=True, env={**os.environ, ENV_COMPILED: "1"})


async def until(condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    """Waits for a condition, with a limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        await asyncio.sleep(0.01)


async def until_async(condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> None:
    """The same for a condition that asks somebody."""
    deadline = time.monotonic() + limit_s
    while not await condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        await asyncio.sleep(0.02)
