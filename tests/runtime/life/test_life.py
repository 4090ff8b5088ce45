"""The life of a whole worker: start, failures to start, death of each process, drain, end. Real processes, the simulated executor."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from fleet_testing.runtime import HTTP, Runtime, wait_for

pytestmark = pytest.mark.processes

CHAT = "/v1/chat/completions"
SLOW = ("--simulated-step-base-ms=20",)
PROBE_TIMEOUT_S = 5.0  # of the readiness probe; operator/fleet_operator/render/workload.py


def chat(prompt: str = "hi", **options: Any) -> dict[str, Any]:
    return {"model": "simulated", "messages": [{"role": "user", "content": prompt}], "ignore_eos": True, **options}


def serves(runtime: Runtime) -> bool:
    try:
        return httpx.post(runtime.data + CHAT, json=chat(max_tokens=2), timeout=30).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Runtime]:
    """A worker whose answers take long enough to be interrupted."""
    with Runtime(tmp_path, *SLOW, "--debug-checks=true") as runtime:
        yield runtime.wait_ready()


class Stream:
    """A stream in a thread: its status, its text, how and when it ended."""

    def __init__(self, runtime: Runtime, tokens: int, **options: Any) -> None:
        self.status = 0
        self.text = ""
        self.error: str | None = None
        self.ended_at = 0.0
        self._runtime, self._body = runtime, chat(max_tokens=tokens, stream=True, **options)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            with httpx.stream("POST", self._runtime.data + CHAT, json=self._body, timeout=60) as answer:
                self.status = answer.status_code
                for piece in answer.iter_text():
                    self.text += piece
        except httpx.TransportError as e:
            self.error = repr(e)
        self.ended_at = time.monotonic()

    def wait_started(self) -> Stream:
        wait_for(lambda: '"content":"' in self.text, "the stream has begun")
        return self

    def is_complete(self) -> bool:
        self.thread.join(60)
        return self.text.endswith("data: [DONE]\n\n")


def test_a_worker_streams_answers_32_at_once_and_gives_its_pages_back(tmp_path: Path) -> None:
    with Runtime(tmp_path, "--debug-checks=true") as runtime:
        runtime.wait_ready()
        client = openai.OpenAI(base_url=runtime.data + "/v1", api_key="none", max_retries=0)

        def one(n: int) -> tuple[str, str]:
            messages: Any = [{"role": "user", "content": f"prompt number {n} " * 4}]
            args: dict[str, Any] = {"model": "simulated", "messages": messages, "max_tokens": 24, "temperature": 0}
            plain = client.chat.completions.create(**args)
            chunks = list(client.chat.completions.create(**args, stream=True))
            assert [c.choices[0].finish_reason for c in chunks][-1] == plain.choices[0].finish_reason
            return plain.choices[0].message.content or "", "".join(c.choices[0].delta.content or "" for c in chunks)

        with ThreadPoolExecutor(32) as pool:
            answers = list(pool.map(one, range(32)))
        assert all(plain == streamed for plain, streamed in answers)
        wait_for(lambda: runtime.metrics()["radixfleet_runtime_pages_request"] == 0, "all pages are back", 2)
        values = runtime.metrics()
        assert values["radixfleet_runtime_http_open_requests"] == values["radixfleet_runtime_running_requests"] == 0
        pages = {k: values[f"radixfleet_runtime_pages_{k}"] for k in ("total", "free", "tree")}
        assert pages["total"] == pages["free"] + pages["tree"]
        long = chat("the same long prompt " * 20, max_tokens=2)
        HTTP.post(runtime.data + CHAT, json=long)
        usage = HTTP.post(runtime.data + CHAT, json=long).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 300
        assert runtime.stop() == 0


def test_a_client_that_leaves_gives_its_pages_back(worker: Runtime) -> None:
    body = json.dumps(chat("x" * 200, max_tokens=2000, stream=True)).encode()
    with socket.create_connection(worker.data_address) as s:
        s.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        s.settimeout(20)
        s.recv(1000)
        assert worker.metrics()["radixfleet_runtime_pages_request"] > 0
    wait_for(lambda: worker.metrics()["radixfleet_runtime_pages_request"] == 0, "pages are back", 2)
    wait_for(lambda: worker.metrics()["radixfleet_runtime_http_open_requests"] == 0, "http forgot it", 2)
    assert serves(worker)


@pytest.mark.case("C89")
def test_probes_are_answered_in_time_under_long_prompts_and_large_bodies(tmp_path: Path) -> None:
    """No probe later than the five seconds that the kubelet waits. Seen red with every text tokenized, on the event loop."""
    flags = ("--context-length=1000000", f"--kv-cache-memory={64 << 20}", "--simulated-prefill-tokens-per-s=20000")
    with Runtime(tmp_path, *flags) as runtime:
        runtime.wait_ready()
        late, stop = list[float](), threading.Event()

        def probe() -> int:
            asked = 0
            with httpx.Client(timeout=30) as client:
                while not stop.wait(0.05):
                    for path in ("/livez", "/readyz"):
                        begin = time.monotonic()
                        status = client.get(runtime.internal + path).status_code
                        took = time.monotonic() - begin
                        late.extend([took] if took > PROBE_TIMEOUT_S or status != 200 else [])
                        asked += 1
            return asked

        with ThreadPoolExecutor(36) as pool:
            probing = pool.submit(probe)
            bodies = [chat(chr(97 + n % 26) * 8000, max_tokens=4) for n in range(30)] + [chat("word " * 400_000, max_tokens=4)] * 3
            answers = list(pool.map(lambda body: httpx.post(runtime.data + CHAT, json=body, timeout=120).status_code, bodies))
            stop.set()
            assert answers == [200] * 30 + [400] * 3  # only the tokenizer can tell that the large ones are over the context
            assert probing.result() > 10 and not late, late


@pytest.mark.case("C86")
@pytest.mark.parametrize("who", ["http", "detokenizer", "scheduler"])
def test_a_killed_process_costs_an_error_and_the_worker_serves_again(worker: Runtime, who: str) -> None:
    scheduler, victim = worker.child("scheduler"), worker.child(who)
    running = Stream(worker, 3000).wait_started()
    record = worker.record()
    killed_at = time.monotonic()
    victim.kill()
    assert not running.is_complete()
    assert running.ended_at - killed_at < 5, "an error within 5 s"
    if who == "http":
        assert running.error is not None, "the connection went with the process"
    else:
        event = json.loads(running.text.rstrip().rpartition("data: ")[2])
        assert "killed by SIGKILL" in event["error"]["message"] and event["error"]["code"] == "worker_process_died"
    with contextlib.suppress(httpx.TransportError):
        answer = httpx.post(worker.data + CHAT, json=chat(max_tokens=2), timeout=30)
        assert answer.status_code in (200, 503)
        if answer.status_code == 503:
            assert "scheduler" in answer.json()["error"]["message"] or who in answer.json()["error"]["message"]
    wait_for(lambda: serves(worker), "it serves again")
    wait_for(lambda: worker.readyz() == 200, "it is ready again")
    assert worker.child(who).pid != victim.pid
    if who == "scheduler":
        assert worker.record()["incarnation"] != record["incarnation"], "announced anew"
    else:
        assert worker.child("scheduler").pid == scheduler.pid, "model and cache stay"
        wait_for(lambda: worker.metrics()["radixfleet_runtime_pages_request"] == 0, "pages of what it carried are back")
    assert worker.stop() == 0


@pytest.mark.parametrize("port", ["data", "internal"])
def test_without_an_http_process_a_request_is_refused_at_once_with_the_cause(worker: Runtime, port: str) -> None:
    """However long the next http process takes to start: here it does not start at all until it may."""
    url = {"data": worker.data, "internal": worker.internal}[port]
    old = worker.child("http")
    old.kill()

    def next_http() -> psutil.Process | None:
        found = worker.child("http")
        return found if found.pid != old.pid else None

    new = wait_for(next_http, "the next http process is started")
    new.suspend()
    try:
        for body in (b"{}", b"x" * 300_000):  # also one that it does not read to the end before it answers
            answer = httpx.post(url + CHAT, content=body, headers={"x-request-id": "mine"}, timeout=5)
            assert (answer.status_code, answer.headers["retry-after"], answer.headers["x-request-id"]) == (503, "1", "mine")
            error = answer.json()["error"]
            assert (error["code"], error["type"], error["request_id"]) == ("worker_restarting", "overloaded_error", "mine")
            assert "http was killed by SIGKILL" in error["message"]
        assert httpx.get(url + "/readyz", timeout=5).status_code == 503
        assert httpx.get(url + "/livez", timeout=5).status_code == 200
        with socket.create_connection(worker.data_address) as silent, socket.create_connection(worker.data_address) as left:
            left.close()
            silent.settimeout(10)
            assert silent.recv(1) == b"", "a client that sends nothing is closed by a limit"
            assert httpx.get(url + "/readyz", timeout=5).status_code == 503
    finally:
        new.resume()
    wait_for(lambda: serves(worker), "it serves again")
    assert worker.stop() == 0


def test_a_scheduler_that_dies_again_and_again_ends_the_worker(worker: Runtime) -> None:
    for _ in range(4):
        child = worker.child("scheduler")
        child.kill()
        psutil.wait_procs([child], 10)
    assert worker.process.wait(20) == 1
    failure = json.loads(worker.termination.read_text())
    assert failure["reason"] == "OutOfMemory" and "SIGKILL" in failure["message"]


def test_sigterm_lets_an_open_stream_end(worker: Runtime) -> None:
    running = Stream(worker, 60).wait_started()
    worker.process.send_signal(signal.SIGTERM)
    wait_for(lambda: worker.readyz() == 503, "not ready at once", 2)
    refused = HTTP.post(worker.data + CHAT, json=chat())
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert refused.headers["connection"] == "close"
    assert running.is_complete()
    assert worker.process.wait(10) == 0


def test_a_drain_that_takes_too_long_ends_its_streams_with_an_error(tmp_path: Path) -> None:
    with Runtime(tmp_path, *SLOW, "--drain-timeout=1") as runtime:
        running = Stream(runtime.wait_ready(), 3000).wait_started()
        assert runtime.stop() == 0
        assert not running.is_complete()
        assert json.loads(running.text.rstrip().rpartition("data: ")[2])["error"]["code"] == "drain_deadline"


def test_a_drain_keeps_the_deadline_of_the_pods_annotation(worker: Runtime) -> None:
    deadline = datetime.now(UTC) - timedelta(seconds=10)
    worker.podinfo.write_text(f'a="b"\nradixfleet.io/draining="{deadline.isoformat()}"\n')
    running = Stream(worker, 3000).wait_started()
    assert worker.stop(timeout_s=15) == 0
    assert not running.is_complete() and "drain_deadline" in running.text


def test_a_second_signal_ends_at_once(worker: Runtime) -> None:
    Stream(worker, 3000).wait_started()
    children = worker.children()
    worker.process.send_signal(signal.SIGINT)
    wait_for(lambda: worker.readyz() == 503, "it drains")
    worker.process.send_signal(signal.SIGINT)
    assert worker.process.wait(5) == 128 + signal.SIGINT
    assert psutil.wait_procs(children, 2)[1] == []


def test_no_child_outlives_a_killed_supervisor(worker: Runtime) -> None:
    children = worker.children()
    assert len(children) == 3
    worker.process.kill()
    assert psutil.wait_procs(children, 2)[1] == []


def test_probes_tell_how_far_a_slow_load_is(tmp_path: Path) -> None:
    with Runtime(tmp_path, "--simulated-load-s=60", "--internal-port=0") as runtime:  # longer than http needs to be there, however busy the machine
        port = wait_for(lambda: find_internal_port(runtime), "http listens")
        url = f"http://127.0.0.1:{port}"
        seen = wait_for(lambda: loading_text(url), "it says how far it is")
        assert "%" in seen
        assert HTTP.get(url + "/livez").status_code == 200
        refused = HTTP.post(url + CHAT, json=chat())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
        assert not runtime.announced()


def find_internal_port(runtime: Runtime) -> int | None:
    for child in runtime.children():
        with contextlib.suppress(psutil.Error):
            if "server.process" in " ".join(child.cmdline()):
                ports = [c.laddr.port for c in child.net_connections() if c.status == psutil.CONN_LISTEN]
                for port in ports:
                    with contextlib.suppress(httpx.TransportError):
                        if httpx.get(f"http://127.0.0.1:{port}/worker", timeout=2).status_code == 503:
                            return int(port)
    return None


def loading_text(url: str) -> str | None:
    answer = HTTP.get(url + "/readyz")
    message = answer.json()["error"]["message"] if answer.status_code == 503 else ""
    return message if message.startswith("loading ") and "loading 0 %" not in message else None


def test_sigterm_while_loading_ends_at_once(tmp_path: Path) -> None:
    with Runtime(tmp_path, "--simulated-load-s=60") as runtime:
        wait_for(lambda: len(runtime.children()) == 3, "its processes run")
        assert runtime.stop(timeout_s=10) == 0


@pytest.mark.parametrize("when_s", [0.0, 0.2, 0.4])
def test_sigterm_in_the_first_moments_ends_the_worker(tmp_path: Path, when_s: float) -> None:
    with Runtime(tmp_path) as runtime:
        time.sleep(when_s)  # the moment is the point; any outcome below is right for it
        runtime.process.send_signal(signal.SIGTERM)
        assert runtime.process.wait(20) in (0, -signal.SIGTERM)
        assert runtime.children() == []


def test_a_frozen_scheduler_makes_the_worker_neither_live_nor_ready(tmp_path: Path) -> None:
    with Runtime(tmp_path, *SLOW, "--stall-timeout=1") as runtime:
        Stream(runtime.wait_ready(), 2000).wait_started()
        scheduler = runtime.child("scheduler")
        scheduler.suspend()
        try:
            wait_for(lambda: HTTP.get(runtime.internal + "/livez").status_code == 503, "not live")
            assert "no progress" in HTTP.get(runtime.internal + "/readyz").json()["error"]["message"]
        finally:
            scheduler.resume()
        wait_for(lambda: HTTP.get(runtime.internal + "/livez").status_code == 200, "live again")
        runtime.process.kill()


@pytest.mark.parametrize(
    ("flags", "code", "reason", "words"),
    [
        (["--no-such-flag=1"], 2, "BadFlag", "--no-such-flag"),
        (["--context-length=2"], 2, "BadFlag", "greater than or equal to 16"),
        (["--model=/no/such/folder", "--executor=torch"], 1, "ModelNotFound", "/no/such/folder"),
        (["--model=bundled://nosuch", "--executor=torch"], 1, "ModelNotFound", "nosuch"),
        (["--executor=torch"], 1, "BadFlag", "simulated"),
        (["--host=203.0.113.9"], 1, "BadFlag", "203.0.113.9"),
    ],
)
def test_a_worker_that_cannot_start_says_why(tmp_path: Path, flags: list[str], code: int, reason: str, words: str) -> None:
    with Runtime(tmp_path, *flags) as runtime:
        assert runtime.process.wait(30) == code
        failure = json.loads(runtime.termination.read_text())
        assert failure["reason"] == reason and words in failure["message"]
        assert words in runtime.text_of_log()


@pytest.mark.parametrize("port", ["data", "internal", "load", "transfer", "events", "replay"])
def test_a_taken_port_is_named(tmp_path: Path, port: str) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        taken = s.getsockname()[1]
        with Runtime(tmp_path, f"--{port}-port={taken}") as runtime:
            assert runtime.process.wait(30) == 1
            failure = json.loads(runtime.termination.read_text())
            assert failure["reason"] == "PortInUse" and str(taken) in failure["message"]


def test_help_and_version_need_no_model() -> None:
    run = lambda flag: subprocess.run([sys.executable, "-m", "fleet_runtime", flag], capture_output=True, text=True, timeout=30)  # noqa: E731
    shown = run("--help")
    assert shown.returncode == 0 and "--kv-cache-memory" in shown.stdout
    assert run("--version").stdout.startswith("radixfleet-runtime ")


def test_an_idle_worker_drains_in_no_time_and_leaves_nothing(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="rf", dir="/tmp"))
    try:
        with Runtime(tmp_path, env={"TMPDIR": str(folder)}) as runtime:
            runtime.wait_ready()
            assert len(list(folder.iterdir())) == 1
            children = runtime.children()
            assert runtime.stop(timeout_s=5) == 0
            assert psutil.wait_procs(children, 2)[1] == []
        assert list(folder.iterdir()) == []
    finally:
        folder.rmdir()
