"""The routers that are compared, each in its documented configuration with its cache-aware policy."""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from fleet_bench.peers.servers import MODEL, Kind, Server, ServerFailed
from fleet_bench.router.mocks import proxy_conf
from fleet_bench.router.tools import Tools

START_S: Final = 60.0
_TICKS: Final = os.sysconf("SC_CLK_TCK")


def ours(name: str, urls: Sequence[str], flags: Sequence[str] = (), python: str = sys.executable) -> Kind:
    """Our router over static workers.

    Args:
        flags: more of radixfleet-router.
        python: another interpreter of the same version, which runs it with the packages of this one.
    """
    environment = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)} if python != sys.executable else {}

    def argv(port: int, second: int) -> list[str]:
        where = ["--host", "127.0.0.1", "--data-port", str(port), "--control-host", "127.0.0.1", "--control-port", str(second)]
        return [python, "-m", "fleet_router", "--static", ",".join(urls), *where, "--log-level", "warning", *flags]

    return Kind(name, argv, environment)


def peer(name: str, python: Path, module: str, urls: Sequence[str]) -> Kind:
    """sglang-router or smg: the same flags."""

    def argv(port: int, second: int) -> list[str]:
        out = [str(python), "-m", module, "--worker-urls", *urls, "--policy", "cache_aware", "--host", "127.0.0.1", "--port", str(port)]
        return [*out, "--prometheus-host", "127.0.0.1", "--prometheus-port", str(second), "--log-level", "warn"]

    return Kind(name, argv)


def floor(name: str, tools: Tools, urls: Sequence[str], folder: Path) -> Kind:
    """nginx as a proxy that routes nothing."""

    def argv(port: int, second: int) -> list[str]:
        conf = folder / f"{port}.conf"
        conf.write_text(proxy_conf(folder, port, urls))
        return [str(tools.nginx), "-p", str(folder), "-e", str(folder / "errors"), "-c", str(conf)]

    return Kind(name, argv, environment=tools.environment)


def cpu_s(server: Server) -> float:
    """Processor time of all its processes that live."""
    total = 0.0
    for pid in server.pids():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += (int(fields[11]) + int(fields[12])) / _TICKS
    return total


def wait_ready(server: Server, *, ask: Callable[[Server], bool] | None = None) -> None:
    """Until a chat is answered with 200. Raises ServerFailed."""
    deadline = time.monotonic() + START_S
    while not (ask or answers)(server):
        server.check()
        if time.monotonic() > deadline:
            raise ServerFailed(f"{server.kind.name} gave no answer within {START_S:g} s")
        time.sleep(0.1)


def answers(server: Server) -> bool:
    """One short chat, no stream."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4})
    try:
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
