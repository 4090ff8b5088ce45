"""`radixfleet serve` for real: processes, one endpoint, an answer, and nothing left after the end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

pytestmark = pytest.mark.processes


@contextmanager
def serving(*argv: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Runs `radixfleet serve` on a free port and yields the process and its URL."""
    argv = ("-m", "fleet_cli", "serve", *argv, "--port", "0")
    process = subprocess.Popen([sys.executable, *argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        seen = []
        assert process.stdout is not None
        for line in process.stdout:
            seen.append(line)
            if found := re.search(r"ready after .*?(http://\S+)/v1", line):
                yield process, found.group(1)
                break
        else:
            pytest.fail("serve ended: " + "".join(seen))
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def wait_gone(processes: list[psutil.Process], *, within_s: float) -> None:
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    assert alive == []


def ask(url: str, text: str = "Hello there, how are you?") -> dict[str, object]:
    body = {"model": "simulated", "messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0, "seed": 7}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


@pytest.mark.parametrize("roles", [("--workers", "2"), ("--prefill", "1", "--decode", "1")])
def test_it_answers_and_ctrl_c_ends_every_process(roles: tuple[str, ...]) -> None:
    with serving("simulated://", *roles) as (process, url):
        answer = ask(url)
        assert answer["usage"]["completion_tokens"] == 8  # type: ignore[index]
        started = descendants(process)
        assert len(started) >= 2 * 4 + 3  # each worker: supervisor and 3; router: supervisor and 2
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        wait_gone(started, within_s=2)


def test_prefill_and_decode_give_the_tokens_of_a_unified_worker() -> None:
    with serving("simulated://", "--workers", "1") as (_, url):
        unified = ask(url)["choices"]
    with serving("simulated://", "--prefill", "1", "--decode", "1") as (_, url):
        assert ask(url)["choices"] == unified


def test_killing_serve_leaves_no_process() -> None:
    with serving("simulated://") as (process, _):
        started = descendants(process)
        process.kill()
        process.wait()
        wait_gone(started, within_s=10)


def test_a_worker_that_cannot_start_ends_serve_with_its_cause(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fleet_cli", "serve", str(tmp_path / "no-such-model"), "--port", "0"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.startswith("radixfleet serve: ModelNotFound: ") and "no-such-model" in done.stderr.splitlines()[0]
    assert "unified-0 exited with code" in done.stderr


def test_a_worker_that_dies_later_ends_serve_with_its_cause() -> None:
    with serving("simulated://", "--workers", "1") as (process, url):
        ask(url)
        children = psutil.Process(process.pid).children()
        worker = next(c for c in children if "radixfleet-runtime" in " ".join(c.cmdline()))
        os.kill(worker.pid, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert process.poll() == 1
        assert process.stdout is not None
        assert "unified-0 was ended by SIGKILL" in process.stdout.read()
