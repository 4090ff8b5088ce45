"""`radixfleet serve MODEL`: one OpenAI endpoint from plain processes, without Kubernetes and without root.

Starts the workers on free loopback ports, waits for their announce files, then starts the router with static discovery.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from fleet_cli.children import Child, end_all
from fleet_contract.launch import BadFlag, RuntimeLaunch, user_args_to_fields
from fleet_contract.names import ENV_TERMINATION_LOG, ROLE_DECODE, ROLE_PREFILL, ROLE_UNIFIED, ROUTER_CONTROL_PORT
from fleet_contract.worker import decode_start_failure

START_LIMIT_S = 900.0
STOP_LIMIT_S = 20.0


class ServeError(Exception):
    """What went wrong, in one message for the user."""


ROUTER_FLAGS: Final = ("api-key-file", "tls-cert-file", "tls-key-file", "cors-origins")  # of --set: of the endpoint, not of workers


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start: pure result of the command line."""

    model: str
    host: str
    port: int
    roles: tuple[str, ...]
    name: str
    log_dir: Path | None
    context_length: int
    kv_cache_memory: int
    fields: dict[str, str]  # other runtime flags
    router_flags: dict[str, str]

    def launch(self, role: str, announce: Path) -> RuntimeLaunch:
        """Flags of one worker: every port free, all on loopback. Raises BadFlag."""
        argv = ["--model", self.model, "--role", role, "--host", "127.0.0.1", "--internal-host", "127.0.0.1", "--announce", str(announce)]
        argv += ["--context-length", str(self.context_length), "--kv-cache-memory", str(self.kv_cache_memory)]
        argv += [w for port in ("data", "internal", "bootstrap", "transfer", "load", "events", "replay") for w in (f"--{port}-port", "0")]
        argv += ["--served-model-name", self.name, "--drain-timeout", "10"]
        argv += [w for field, value in self.fields.items() for w in ("--" + field.replace("_", "-"), value)]
        return RuntimeLaunch.from_argv(argv)


def byte_count(text: str) -> int:
    """`512Mi`, `2Gi` or a plain number of bytes."""
    number, factor = text, 1
    for suffix, value in (("Ki", 1 << 10), ("Mi", 1 << 20), ("Gi", 1 << 30)):
        if text.endswith(suffix):
            number, factor = text.removesuffix(suffix), value
    try:
        return int(number) * factor
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} given; bytes are needed, as 512Mi, 2Gi or 536870912") from None


def parse(argv: Sequence[str]) -> Plan:
    """Reads the command line. Raises SystemExit (argparse) or ServeError."""
    p = argparse.ArgumentParser(prog="radixfleet serve", description=(__doc__ or "").split("\n")[0])
    p.add_argument("model", help="bundled://smollm2-135m-instruct, a .gguf file, a Hugging Face folder, or simulated://")
    p.add_argument("--workers", type=int, help="that many unified workers (default 1)")
    p.add_argument("--prefill", type=int, help="prefill workers; needs --decode")
    p.add_argument("--decode", type=int, help="decode workers; needs --prefill")
    p.add_argument("--host", default="127.0.0.1", help="address of the endpoint (default %(default)s)")
    p.add_argument("--port", type=int, default=8000, help="port of the endpoint, 0 = any free one (default %(default)s)")
    p.add_argument("--name", help="served model name (default: the model's own)")
    p.add_argument("--context-length", type=int, default=2048, help="longest prompt + answer in tokens (default %(default)s)")
    p.add_argument("--kv-cache-memory", type=byte_count, default=512 << 20, help="memory of KV pages of each worker, as 512Mi or 2Gi (default 512Mi)")
    p.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FLAG=VALUE",
        help="a flag marked args in docs/flags.md, for workers (keys, TLS and CORS: for the endpoint); repeat for more",
    )
    p.add_argument("--log-dir", type=Path, help="folder for the logs (default: a temporary one, removed at a clean end)")
    a = p.parse_args(argv)
    if (a.prefill is None) != (a.decode is None):
        raise ServeError("--prefill and --decode go together; give both, or --workers")
    if a.workers is not None and a.prefill is not None:
        raise ServeError("--workers makes unified workers; give it or --prefill and --decode, not both")
    counts = [("--workers", a.workers), ("--prefill", a.prefill), ("--decode", a.decode)]
    if bad := [f"{flag} is {n}; at least 1 is needed" for flag, n in counts if n is not None and n < 1]:
        raise ServeError("; ".join(bad))
    split = {}
    for item in a.set:
        flag, eq, value = item.partition("=")
        if not eq:
            raise ServeError(f"--set {item!r}: FLAG=VALUE is needed, as in --set max-rows=8")
        split[flag.removeprefix("--")] = value
    router_flags = {flag: split.pop(flag) for flag in ROUTER_FLAGS if flag in split}  # the endpoint that clients see is the router's
    try:
        fields = user_args_to_fields(split)
    except BadFlag as e:
        raise ServeError(str(e).replace("engine.args", "--set")) from e
    if a.model.startswith("simulated://"):
        fields.setdefault("executor", "simulated")
    if a.prefill is not None:
        roles = (ROLE_PREFILL,) * a.prefill + (ROLE_DECODE,) * a.decode
    else:
        roles = (ROLE_UNIFIED,) * (a.workers or 1)
    name = a.name or a.model.rstrip("/").rsplit("/", 1)[-1].rstrip(":")
    return Plan(a.model, a.host, a.port, roles, name, a.log_dir, a.context_length, a.kv_cache_memory, fields, router_flags)


def check_port(host: str, port: int) -> None:
    """Raises ServeError when the endpoint cannot be bound, before anything is started."""
    try:
        with socket.create_server((host, port)):
            pass
    except OSError as e:
        raise ServeError(f"--port {port} on {host} cannot be used: {e.strerror}; choose another, or 0 for any free one") from e


class Fleet:
    """The started processes of one `serve`."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.folder = folder
        self.workers: list[Child] = []
        self.router: Child | None = None
        self.control_url = ""
        self.stop = threading.Event()

    def cause_file(self, name: str) -> Path:
        """Where a worker writes why it cannot start."""
        return self.folder / f"{name}.cause"

    @property
    def children(self) -> list[Child]:
        return [c for c in (self.router, *self.workers) if c is not None]

    def check_alive(self) -> None:
        """Raises ServeError with the cause when a child has ended by itself."""
        for child in self.children:
            if (text := child.exit_text()) is not None:
                cause = self.cause_file(child.name)
                told = decode_start_failure(cause.read_text()) if cause.exists() else None
                raise ServeError(text if told is None else f"{told.reason}: {told.message}\n{text}")

    def announced(self, paths: Sequence[Path]) -> list[dict[str, object]]:
        """Waits for all announce files. Raises ServeError when a child ends first, or after START_LIMIT_S."""
        deadline = time.monotonic() + START_LIMIT_S
        while missing := [p for p in paths if not p.exists()]:
            self.check_alive()
            if time.monotonic() > deadline:
                raise ServeError(f"{', '.join(p.stem for p in missing)} not ready after {START_LIMIT_S:.0f} s; logs in {self.folder}")
            if self.stop.wait(0.05):
                raise KeyboardInterrupt
        return [json.loads(p.read_text()) for p in paths]

    def start(self) -> str:
        """Starts workers, then the router. Returns the endpoint's base URL."""
        paths = []
        for i, role in enumerate(self.plan.roles):
            path = self.folder / f"{role}-{i}.json"
            argv = ["radixfleet-runtime", *self.plan.launch(role, path).to_argv()]
            name = f"{role}-{i}"
            cause = {ENV_TERMINATION_LOG: str(self.cause_file(name))}
            self.workers.append(Child.start(name, command(argv), self.folder / f"{name}.log", cause))
            paths.append(path)
        records = self.announced(paths)
        urls = [f"http://127.0.0.1:{r['ports']['internal']}" for r in records]  # type: ignore[index]
        path = self.folder / "router.json"
        argv = ["radixfleet-router", "--static", ",".join(urls), "--host", self.plan.host, "--data-port", str(self.plan.port)]
        argv += ["--control-host", "127.0.0.1", "--control-port", str(self.control_port()), "--announce", str(path)]
        argv += [word for flag, value in self.plan.router_flags.items() for word in (f"--{flag}", value)]
        self.router = Child.start("router", command(argv), self.folder / "router.log")
        ports = self.announced([path])[0]
        self.control_url = f"http://127.0.0.1:{ports['controlPort']}"
        self.wait_ready(f"{self.control_url}/readyz")
        scheme = "https" if "tls-cert-file" in self.plan.router_flags else "http"
        return f"{scheme}://{self.plan.host if ':' not in self.plan.host else '[' + self.plan.host + ']'}:{ports['dataPort']}"

    def control_port(self) -> int:
        """The usual one, so that `radixfleet top` finds it by itself; another when that is taken or the endpoint's port is any."""
        if self.plan.port == 0:
            return 0
        try:
            check_port("127.0.0.1", ROUTER_CONTROL_PORT)
        except ServeError:
            return 0
        return ROUTER_CONTROL_PORT

    def wait_ready(self, url: str) -> None:
        """Waits until the router has all workers in its table."""
        deadline = time.monotonic() + 30
        while True:
            self.check_alive()
            try:
                with urllib.request.urlopen(url, timeout=2):
                    return
            except (urllib.error.URLError, TimeoutError, ConnectionError) as e:
                if time.monotonic() > deadline:
                    raise ServeError(f"the router is not ready after 30 s: {e}; logs in {self.folder}") from e
            if self.stop.wait(0.05):
                raise KeyboardInterrupt

    def run(self) -> None:
        """Blocks until Ctrl-C or SIGTERM. Raises ServeError when a child ends by itself."""
        while not self.stop.wait(0.5):
            self.check_alive()

    def end(self) -> None:
        """Ends router, then workers."""
        if self.router is not None:
            end_all([self.router], timeout_s=STOP_LIMIT_S)
        end_all(self.workers, timeout_s=STOP_LIMIT_S)


def command(argv: Sequence[str]) -> list[str]:
    """The console script beside our own interpreter, wherever PATH points."""
    beside = Path(sys.executable).parent / argv[0]
    return [str(beside) if beside.exists() else argv[0], *argv[1:]]


def main(argv: Sequence[str]) -> int:
    """Runs until Ctrl-C. Exit code 0 after a stop, 1 when something failed, 2 for a wrong command line."""
    try:
        plan = parse(argv)
        check_port(plan.host, plan.port)
        plan.launch(plan.roles[0], Path("check"))
    except (ServeError, BadFlag) as e:
        print(f"radixfleet serve: {e}", file=sys.stderr)
        return 2
    folder = plan.log_dir or Path(tempfile.mkdtemp(prefix="radixfleet-serve-"))
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("*.json"), *folder.glob("*.cause")):
        old.unlink()
    fleet = Fleet(plan, folder)

    def on_signal(number: int, frame: FrameType | None) -> None:
        if fleet.stop.is_set():  # the second one: at once
            for child in fleet.children:
                child.process.kill()
        fleet.stop.set()

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    started = time.monotonic()
    failed = False
    try:
        print(f"starting {len(plan.roles)} worker(s) for {plan.model} ...", flush=True)
        url = fleet.start()
        print(f"ready after {time.monotonic() - started:.1f} s: {url}/v1  (model {plan.name}, logs in {folder})")
        print(f"dashboard: {fleet.control_url}/  (in the terminal: radixfleet top --url {fleet.control_url})")
        print(f"""try it:
  curl {"-k " if url.startswith("https") else ""}{url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{plan.name}", "messages": [{{"role": "user", "content": "What is the capital of France?"}}], "temperature": 0, "stream": true}}'
Ctrl-C ends it.""")
        sys.stdout.flush()
        fleet.run()
    except ServeError as e:
        print(f"radixfleet serve: {e}", file=sys.stderr)
        failed = True
    except KeyboardInterrupt:
        pass
    finally:
        fleet.end()
    if plan.log_dir is None and not failed:
        shutil.rmtree(folder, ignore_errors=True)
    print("stopped")
    return 1 if failed else 0
