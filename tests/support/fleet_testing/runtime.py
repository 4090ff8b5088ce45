"""A whole runtime as processes, for tests: started on free ports of loopback, and ended with all its children."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from fleet_contract import names

SUPPORT = str(Path(__file__).parents[1])
START_S = 60.0
# One client for all tests: making one reads the machine's certificates, which takes a tenth of a second. Each request has a connection of its own.
HTTP = httpx.Client(verify=False, timeout=60, limits=httpx.Limits(max_keepalive_connections=0))


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    """The first true value of `condition`; fails with `what` when the time is over."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)


def _is_dead(process: psutil.Process) -> bool:
    """Gone, or a zombie: whoever inherits it may take a second to look at it."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Runtime:
    """One `radixfleet-runtime`. Use as a context manager; `fake` takes the scripted scheduler."""

    def __init__(self, folder: Path, *flags: str, fake: bool = False, env: dict[str, str] | None = None) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.announce = folder / "announce.json"
        self.termination = folder / "termination"
        self.podinfo = folder / "annotations"
        self.scheduler_log = folder / "scheduler.jsonl"
        self.log = folder / "log"
        module = "fleet_testing.fake_runtime" if fake else "fleet_runtime"
        defaults = {"model": "simulated://", "executor": "simulated", "host": "127.0.0.1", "internal-host": "127.0.0.1", "threads": "1"}
        defaults |= {f"{p}-port": "0" for p in ("data", "internal", "bootstrap", "transfer", "load", "events", "replay")}
        given = {f.split("=")[0].removeprefix("--") for f in flags if f.startswith("--")}
        argv = [f"--{k}={v}" for k, v in defaults.items() if k not in given]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *argv, f"--announce={self.announce}", *flags],
                env=os.environ
                | {
                    "PYTHONPATH": os.pathsep.join([SUPPORT, os.environ.get("PYTHONPATH", "")]),
                    names.ENV_TERMINATION_LOG: str(self.termination),
                    "RADIXFLEET_PODINFO_ANNOTATIONS": str(self.podinfo),
                    "FAKE_SCHEDULER_LOG": str(self.scheduler_log),
                }
                | (env or {}),
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exc: object) -> None:
        children = self.children()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        wait_for(lambda: all(map(_is_dead, children)), "the kernel has killed them with their parent", 10)
        if exc[0] is not None:
            sys.stderr.write(self.text_of_log()[-6000:])

    def wait_ready(self, timeout_s: float = START_S) -> Runtime:
        """Until `/readyz` is 200."""
        wait_for(lambda: (self.announced() and self.readyz() == 200) or self.ended(), "the runtime is ready", timeout_s)
        assert not self.ended(), self.text_of_log()[-3000:]
        return self

    def ended(self) -> bool:
        return self.process.poll() is not None

    def announced(self) -> bool:
        return self.announce.is_file()

    def record(self) -> dict[str, Any]:
        return json.loads(self.announce.read_bytes())

    @property
    def data(self) -> str:
        return f"http://127.0.0.1:{self.record()['ports']['data']}"

    @property
    def internal(self) -> str:
        return f"http://127.0.0.1:{self.record()['ports']['internal']}"

    @property
    def data_address(self) -> tuple[str, int]:
        return "127.0.0.1", self.record()["ports"]["data"]

    def readyz(self) -> int:
        try:
            return HTTP.get(f"{self.internal}/readyz", timeout=30).status_code
        except httpx.TransportError:
            return 0

    def children(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def child(self, who: str) -> psutil.Process:
        """The child process of that name, as of now."""

        def find() -> psutil.Process | None:
            for child in self.children():
                with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    words = child.cmdline()
                    if any(f"{w}.process" in " ".join(words) for w in ({"http": "server"}.get(who, who),)) or f"fake_{who}" in " ".join(words):
                        return child
            return None

        found: psutil.Process = wait_for(find, f"{who} lives")
        return found

    def metrics(self) -> dict[str, float]:
        """Name with labels -> value."""
        lines = HTTP.get(f"{self.internal}/metrics").text.splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}

    def sent(self, kind: str) -> list[dict[str, Any]]:
        """What http sent to the scripted scheduler, of one kind."""
        lines = self.scheduler_log.read_text().splitlines() if self.scheduler_log.is_file() else []
        return [d for d in map(json.loads, lines) if d["kind"] == kind]

    def stop(self, timeout_s: float = 20.0) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def text_of_log(self) -> str:
        return self.log.read_text(errors="replace")
