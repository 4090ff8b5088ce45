"""Deletion without the operator, killed processes, several services on one endpoint, bad input through the endpoint."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx
import pytest

from fleet_contract import names
from fleet_testing.fleet import Fleet, simulated, wait_for

pytestmark = pytest.mark.e2e


def chat(fleet: Fleet, model: str, *, timeout_s: float = 30, **fields: Any) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0, **fields}
    return httpx.post(f"{fleet.url}/v1/chat/completions", json=body, timeout=timeout_s)


def test_with_the_operator_gone_deleting_works_and_bad_yaml_is_still_refused(fleet: Fleet, namespace: str) -> None:
    fleet.apply(simulated("doomed", namespace, prefill=1, decode=1))
    fleet.wait_ready("doomed", namespace)
    service = fleet.service("doomed", namespace)
    assert "finalizers" not in service["metadata"]
    assert not [a for a in service["metadata"].get("annotations", {}) if "kopf" in a]
    fleet.kubectl("scale", "deployment", "radixfleet-operator", "-n", names.SYSTEM_NAMESPACE, "--replicas=0")
    try:
        wait_for(
            lambda: not fleet.list("pods", names.SYSTEM_NAMESPACE, f"{names.LABEL_COMPONENT}={names.COMPONENT_OPERATOR}"),
            within_s=60,
            what="no operator pod",
        )
        with pytest.raises(Exception, match=r"set either spec\.unified, or both"):
            fleet.apply(simulated("bad", namespace, prefill=1))
        fleet.kubectl("delete", "infsvc", "doomed", "-n", namespace, "--timeout=60s")
        selector = f"{names.LABEL_SERVICE}=doomed"
        wait_for(
            lambda: not any(fleet.list(k, namespace, selector) for k in ("pods", "statefulsets", "services", "configmaps", "controllerrevisions")),
            within_s=60,
            what="all objects of the service gone",
        )
    finally:
        fleet.kubectl("scale", "deployment", "radixfleet-operator", "-n", names.SYSTEM_NAMESPACE, "--replicas=1")
        fleet.kubectl("rollout", "status", "deployment/radixfleet-operator", "-n", names.SYSTEM_NAMESPACE, "--timeout=90s")


PROCESSES = ("supervisor", "scheduler", "detokenizer", "http")


def runtime_processes(fleet: Fleet, pod: dict[str, Any]) -> dict[str, int]:
    """Process ids inside a worker pod, by part."""
    meta = pod["metadata"]
    script = "for d in /proc/[0-9]*; do printf '%s ' ${d#/proc/}; tr '\\0' ' ' < $d/cmdline; echo; done"
    out = fleet.kubectl("exec", "-n", meta["namespace"], meta["name"], "--", "sh", "-c", script)
    found: dict[str, int] = {}
    for line in out.splitlines():
        pid, _, command = line.partition(" ")
        for part, mark in (("scheduler", "scheduler.process"), ("detokenizer", "detokenizer.process"), ("http", "server.process")):
            if mark in command:
                found[part] = int(pid)
        if "radixfleet-runtime" in command:
            found["supervisor"] = min(int(pid), found.get("supervisor", 1 << 30))
    return found


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("victim", PROCESSES)
def test_any_killed_runtime_process_answers_its_clients_and_comes_back(fleet: Fleet, victims: str, role: str, victim: str) -> None:
    namespace, name = victims, "victim"
    fleet.wait_ready(name, namespace)
    pod = fleet.ready_pods(name, namespace, role)[0]
    pids = runtime_processes(fleet, pod)
    assert set(pids) == set(PROCESSES), pids
    ended: list[tuple[float, str]] = []
    first = threading.Event()

    def stream() -> None:
        body = {"model": f"{namespace}/{name}", "messages": [{"role": "user", "content": "go"}], "max_tokens": 300, "stream": True}
        try:
            with httpx.stream("POST", f"{fleet.url}/v1/chat/completions", json=body, timeout=60) as answer:
                data = ""
                for chunk in answer.iter_text():
                    data += chunk
                    first.set()
        except httpx.HTTPError as e:
            data = f"{type(e).__name__}"
        ended.append((time.monotonic(), data[-400:]))

    reader = threading.Thread(target=stream)
    reader.start()
    assert first.wait(30)
    if victim == "supervisor":  # it is process 1 of the pod: a signal from inside does not reach it, so the container is ended as a whole
        fleet.kubectl("exec", "-n", namespace, pod["metadata"]["name"], "--", "sh", "-c", f"kill -9 {pids['scheduler']} {pids['http']}")
    else:
        fleet.kubectl("exec", "-n", namespace, pod["metadata"]["name"], "--", "sh", "-c", f"kill -9 {pids[victim]}")
    killed = time.monotonic()
    if role == "decode":
        reader.join(20)
        assert ended, "the client hangs"
        at, data = ended[0]
        assert at - killed < 5, f"the client was told after {at - killed:.1f} s"
        assert "[DONE]" not in data or '"finish_reason"' in data
    wait_for(lambda: chat(fleet, f"{namespace}/{name}", timeout_s=10).status_code == 200, within_s=60, what="it serves again")
    reader.join(60)
    assert ended
    fleet.wait_ready(name, namespace, within_s=60)


def test_two_services_in_two_namespaces_share_the_endpoint(fleet: Fleet, namespace: str, other_namespace: str) -> None:
    fleet.apply(simulated("twin", namespace, unified=1), simulated("solo", other_namespace, unified=1))
    fleet.wait_ready("twin", namespace)
    fleet.apply(simulated("twin", other_namespace, unified=1))
    fleet.wait_ready("solo", other_namespace)
    fleet.wait_condition("twin", other_namespace, "Available")
    models = {m.id for m in fleet.client().models.list()}
    assert {"twin", "solo", f"{namespace}/twin", f"{other_namespace}/twin", f"{other_namespace}/solo"} <= models

    def finished(name: str, ns: str) -> float:
        return fleet.metrics(fleet.ready_pods(name, ns)[0])["finished_requests_total"]

    for model, name, ns in (
        ("solo", "solo", other_namespace),
        ("twin", "twin", namespace),  # the older one owns the short name
        (f"{other_namespace}/twin", "twin", other_namespace),
        (f"{namespace}/twin", "twin", namespace),
    ):
        before = finished(name, ns)
        assert chat(fleet, model).status_code == 200
        wait_for(lambda before=before, name=name, ns=ns: finished(name, ns) == before + 1, within_s=5, what=f"{model} served by {ns}/{name}")
    fleet.kubectl("delete", "infsvc", "twin", "-n", namespace, "--timeout=60s")
    before = finished("twin", other_namespace)
    wait_for(lambda: chat(fleet, "twin").status_code == 200, within_s=30, what="the short name passes on")
    assert finished("twin", other_namespace) > before


BAD: list[tuple[str, bytes, int, str]] = [
    ("invalid JSON", b'{"model": "M", "messages": [', 400, "invalid_json"),
    ("not an object", b"[1]", 400, ""),
    ("no model", b'{"messages": [{"role": "user", "content": "x"}]}', 400, ""),
    ("unknown model", b'{"model": "nope", "messages": [{"role": "user", "content": "x"}]}', 404, "model_not_found"),
    ("messages of a wrong type", b'{"model": "M", "messages": "x"}', 400, ""),
    ("empty messages", b'{"model": "M", "messages": []}', 400, ""),
    ("max_tokens 0", b'{"model": "M", "messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', 400, ""),
    ("max_tokens negative", b'{"model": "M", "messages": [{"role": "user", "content": "x"}], "max_tokens": -5}', 400, ""),
    ("max_tokens huge", b'{"model": "M", "messages": [{"role": "user", "content": "x"}], "max_tokens": 99999999}', 400, ""),
    ("temperature", b'{"model": "M", "messages": [{"role": "user", "content": "x"}], "temperature": 9}', 400, ""),
    ("top_p", b'{"model": "M", "messages": [{"role": "user", "content": "x"}], "top_p": 0}', 400, ""),
    ("unsupported", b'{"model": "M", "messages": [{"role": "user", "content": "x"}], "suffix": "x"}', 400, ""),
    ("too long", b'{"model": "M", "messages": [{"role": "user", "content": "' + b"word " * 3000 + b'"}]}', 400, "context_length_exceeded"),
]


@pytest.mark.parametrize(("what", "body", "status", "code"), BAD, ids=[b[0] for b in BAD])
def test_bad_input_has_the_one_error_shape_and_hurts_nobody(fleet: Fleet, victims: str, what: str, body: bytes, status: int, code: str) -> None:
    fleet.wait_ready("victim", victims)
    before = {p["metadata"]["name"]: fleet.worker(p)["incarnation"] for p in fleet.ready_pods("victim", victims)}
    body = body.replace(b'"M"', json.dumps(f"{victims}/victim").encode())
    headers = {"Content-Type": "application/json", "X-Request-Id": "case-1"}
    answer = httpx.post(f"{fleet.url}/v1/chat/completions", content=body, headers=headers, timeout=30)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "code", "param", "request_id"}
    assert error["request_id"] == "case-1" == answer.headers["x-request-id"]
    if code:
        assert error["code"] == code
    if what == "too long":
        assert "2048" in error["message"]
    assert chat(fleet, f"{victims}/victim").status_code == 200
    assert {p["metadata"]["name"]: fleet.worker(p)["incarnation"] for p in fleet.ready_pods("victim", victims)} == before


def test_out_of_vocabulary_ids_are_refused(fleet: Fleet, victims: str) -> None:
    fleet.wait_ready("victim", victims)
    body = {"model": f"{victims}/victim", "prompt": [1, 2, 10**6], "max_tokens": 2}
    answer = httpx.post(f"{fleet.url}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 400
    assert "1000000" in answer.json()["error"]["message"]
