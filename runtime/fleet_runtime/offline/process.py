"""The processes behind an `Engine`: a whole worker on free loopback ports, started as a child that never outlives its owner."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from fleet_contract import names
from fleet_contract.launch import BadFlag, RuntimeLaunch
from fleet_contract.lifeline import before_exec
from fleet_contract.worker import WorkerRecord, decode_start_failure
from fleet_runtime.errors import StartError

HOST: Final = "127.0.0.1"
_PORTS: Final = ("data_port", "internal_port", "bootstrap_port", "transfer_port", "load_port", "events_port", "replay_port")
# Where it listens and what only a server needs is not the caller's to set.
_OURS: Final = frozenset({*_PORTS, "host", "internal_host", "announce", "role", "tls_cert_file", "tls_key_file", "api_key_file", "cors_origins"})
# Nobody else waits for a program's own requests: they take the time that they take.
_DEFAULTS: Final = {"request_timeout": 86_400, "queue_timeout": 86_400, "max_body_bytes": 1 << 28, "drain_timeout": 0, "log_level": "warning"}
_POLL_S: Final = 0.02
_STOP_S: Final = 15.0
_TAIL_BYTES: Final = 2000


def launch(model: str, flags: Mapping[str, Any], announce: Path) -> RuntimeLaunch:
    """The worker's command line. Args: flags: fields of `RuntimeLaunch`. Raises StartError(BadFlag)."""
    if taken := sorted(_OURS & flags.keys()):
        raise StartError("BadFlag", f"{', '.join(taken)}: the Engine sets it itself; leave it out, or run `radixfleet serve` for a server")
    given = {**dict.fromkeys(_PORTS, 0), **_DEFAULTS, **flags, "model": model, "host": HOST, "internal_host": HOST, "announce": str(announce)}
    argv: list[str] = []
    for name, value in given.items():
        for item in value if isinstance(value, (list, tuple)) else (value,):
            text = ("true" if item else "false") if isinstance(item, bool) else str(item)
            argv.append(f"--{name.replace('_', '-')}={text}")
    try:
        return RuntimeLaunch.from_argv(argv)
    except BadFlag as e:
        raise StartError("BadFlag", str(e)) from e


class EngineProcess:
    """One worker. Knows nothing of who owns it, so that its owner can be garbage."""

    def __init__(self, model: str, flags: Mapping[str, Any], log: Path | None) -> None:
        """Starts it; `wait_ready` comes next. Raises StartError(BadFlag)."""
        self._owner = os.getpid()
        self._folder = Path(tempfile.mkdtemp(prefix="radixfleet-engine-"))
        self._announce = self._folder / "announce.json"
        self._termination = self._folder / "termination"
        self._log = log or self._folder / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        try:
            argv = launch(model, flags, self._announce).to_argv()
            self._start(argv)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    @property
    def pid(self) -> int:
        """Of the worker's supervisor."""
        assert self._process is not None
        return self._process.pid

    def _start(self, argv: list[str]) -> None:
        """From a thread that lives as long as the child: the kernel ends a child with the *thread* that started it, and who makes an
        Engine may be a thread of a pool."""
        started = threading.Event()
        failure: list[OSError] = []

        def keep() -> None:
            try:
                with self._log.open("ab") as out:
                    process = self._process = subprocess.Popen(
                        [sys.executable, "-m", "fleet_runtime", *argv],
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=out,
                        start_new_session=True,  # a Ctrl-C of the terminal is the owner's to handle
                        preexec_fn=before_exec(self._owner),
                        env=os.environ | {names.ENV_TERMINATION_LOG: str(self._termination)},
                    )
            except OSError as e:
                failure.append(e)
                return
            finally:
                started.set()
            process.wait()

        threading.Thread(target=keep, name="engine-keeper", daemon=True).start()
        started.wait()
        if failure:
            raise StartError("Internal", f"the engine's process cannot be started: {failure[0]}") from failure[0]

    def wait_ready(self, timeout_s: float) -> WorkerRecord:
        """Blocks until it takes requests. Raises StartError with the worker's own cause."""
        deadline = time.monotonic() + timeout_s
        record: WorkerRecord | None = None
        while True:
            if (cause := self.ended()) is not None:
                raise self._failure(cause)
            if record is None:
                with contextlib.suppress(FileNotFoundError):
                    record = msgspec.json.decode(self._announce.read_bytes(), type=WorkerRecord)
            if record is not None and _is_ready(record.ports.internal):
                return record
            if time.monotonic() > deadline:
                raise StartError("Internal", f"the engine is not ready after {timeout_s:g} s; the end of its log:\n{self._tail()}")
            time.sleep(_POLL_S)

    def ended(self) -> str | None:
        """How it ended, in words; None while it runs."""
        if self._closed:
            return "the engine is closed"
        if os.getpid() != self._owner:  # a fork of the owner may ask, but it is not its child there
            return None
        assert self._process is not None
        code = self._process.poll()
        if code is None:
            return None
        how = f"exited with code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
        return f"the engine's process {how}"

    def stop(self) -> None:
        """Ends it and waits for that; what runs is not finished. Again, or in a fork of the owner: nothing."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _failure(self, cause: str) -> StartError:
        told = decode_start_failure(self._termination.read_text()) if self._termination.is_file() else None
        if told is not None and told.reason in names.START_FAILURES:
            return StartError(told.reason, told.message)
        return StartError("Internal", f"{cause}; the end of its log:\n{self._tail()}")

    def _tail(self) -> str:
        try:
            return self._log.read_bytes()[-_TAIL_BYTES:].decode("utf-8", "replace")
        except OSError:
            return ""


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
