"""Workers that answer at once: nginx for whole answers, a raw event loop for paced and for idle streams. Owned by a scenario's stage.

They answer what each router asks of its workers: `/readyz`, `/worker` and `/tokenizer` (ours), `/health`, `/get_server_info`,
`/get_model_info`, `/v1/models` (the peers).
"""

from __future__ import annotations

import http.client
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

from fleet_bench.peers.servers import MODEL, ServerFailed, free_port
from fleet_bench.router.tools import Tools

TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "config.json")
START_S: Final = 10.0
ANSWER: Final = json.dumps({
    "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": MODEL,
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello there, how can I help you today?"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 500, "completion_tokens": 10, "total_tokens": 510},
})  # fmt: skip
ABOUT: Final = json.dumps({"model_path": MODEL, "data": [{"id": MODEL, "object": "model"}]})


def record(port: int) -> str:
    """What a worker says of itself to our router. Fast and large: it is never the reason why a request waits."""
    return json.dumps({
        "schema": 1, "podUid": f"mock-{port}", "incarnation": f"{port:016x}", "revision": "r1", "modelRevision": "00112233445566aa",
        "servedNames": [MODEL], "kvCapacityTokens": 1_000_000, "maxRows": 256, "contextLength": 131_072, "ports": {"internal": port},
        "profile": {"prefillTokensPerS": 1e7, "stepBaseS": 0.001},
    })  # fmt: skip


def tokenizer_zip(folder: Path) -> bytes:
    """The answer of `GET /tokenizer`, of a model folder."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as z:
        for name in TOKENIZER_FILES:
            if (folder / name).is_file():
                z.write(folder / name, name)
    return out.getvalue()


class Workers:
    """A process that plays several workers, each on a port of its own. Use as a context manager."""

    def __init__(self, ports: Sequence[int], argv: Sequence[str], environment: dict[str, str], folder: tempfile.TemporaryDirectory[str]) -> None:
        self.ports = tuple(ports)
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        self._folder = folder
        self._log = Path(folder.name, "log")
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                list(argv), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """SIGTERM, then SIGKILL; its folder goes too."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                self._process.send_signal(number)
                try:
                    self._process.wait(5)
                except subprocess.TimeoutExpired:
                    continue
        self._folder.cleanup()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while not _answers(self.ports[-1]):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ServerFailed(f"the mock workers did not start:\n{self._log.read_text(errors='replace')[-800:]}")
            time.sleep(0.02)


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _free_ports(count: int) -> list[int]:
    """Different ones: the system may name a port that is free twice."""
    ports: dict[int, None] = {}
    while len(ports) < count:
        ports[free_port()] = None
    return list(ports)


def nginx_workers(tools: Tools, count: int, *, tokenizer: bytes | None) -> Workers:
    """Whole answers of one process of nginx. Without `tokenizer` ours has to route by the bytes of a request."""
    folder = tempfile.TemporaryDirectory(prefix="radixfleet-bench-nginx-")
    root = Path(folder.name)
    if tokenizer is not None:
        (root / "tokenizer").write_bytes(tokenizer)
    ports = _free_ports(count)
    (root / "nginx.conf").write_text(nginx_conf(root, ports))
    argv = [str(tools.nginx), "-p", folder.name, "-e", str(root / "errors"), "-c", str(root / "nginx.conf")]
    return Workers(ports, argv, tools.environment, folder)


def nginx_conf(root: Path, ports: Sequence[int]) -> str:
    """One server for each worker; no log, connections kept for good."""
    servers = "\n".join(
        f"""server {{ listen 127.0.0.1:{port} backlog=1024; root {root};
  location = /worker {{ return 200 '{record(port)}'; }}
  location = /tokenizer {{ }}
  location ~ ^/(health|readyz|livez)$ {{ return 200 '{{"status":"ok"}}'; }}
  location ~ ^/v1/(chat/)?completions$ {{ return 200 '{ANSWER}'; }}
  location / {{ return 200 '{ABOUT}'; }} }}"""
        for port in ports
    )
    return _conf(root, servers, processes=1)


def proxy_conf(root: Path, port: int, urls: Sequence[str]) -> str:
    """A proxy that reads no body and chooses nobody: the workers in turn, connections kept. What remains is what the machine takes."""
    workers = "".join(f" server {url.removeprefix('http://')};" for url in urls)
    servers = f"""upstream workers {{{workers} keepalive 64; keepalive_requests 1000000000; }}
server {{ listen 127.0.0.1:{port} backlog=1024 reuseport;
  location / {{ proxy_pass http://workers; proxy_http_version 1.1; proxy_set_header Connection ""; }} }}"""
    return _conf(root, servers, processes=os.cpu_count() or 1)


def _conf(root: Path, servers: str, *, processes: int) -> str:
    paths = "".join(f" {kind}_temp_path {root}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    user = "user root;" if os.geteuid() == 0 else ""
    return f"""{user} worker_processes {processes}; daemon off; pid {root}/pid; error_log {root}/errors crit;
events {{ worker_connections 4096; }}
http {{ access_log off; default_type application/json; keepalive_requests 1000000000; keepalive_timeout 3600;{paths}
client_body_buffer_size 1m; client_max_body_size 64m;
{servers}
}}
"""


def stream_workers(count: int, *, chunks: int, pause_s: float) -> Workers:
    """Streams of `chunks` events, one each `pause_s`. No chunks: the first event, then silence until the client goes."""
    folder = tempfile.TemporaryDirectory(prefix="radixfleet-bench-streams-")
    ports = _free_ports(count)
    argv = [sys.executable, "-m", "fleet_bench.router.stream_mock", ",".join(map(str, ports)), str(chunks), str(pause_s)]
    return Workers(ports, argv, dict(os.environ), folder)
