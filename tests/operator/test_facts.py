"""What a pod's status says about why it is not ready, with the next step; names; flags; health."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from fleet_operator.facts import Key, find_trouble
from fleet_operator.health import HealthServer
from fleet_operator.served_names import ServedNames
from fleet_operator.settings import parse
from fleet_operator.validate import validate


def pod(**status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p-0"}, "status": status}


def container(state: dict[str, Any], last: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    return [{"name": "runtime", "image": "img:1", "state": state, "lastState": {"terminated": last} if last else {}}]


BACKOFF = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting"}}
SAID = {"exitCode": 1, "message": json.dumps({"reason": "ModelNotFound", "message": "no folder /m"})}
LOG = {"exitCode": 1, "message": "Traceback (most recent call last):\n  line\nValueError: boom\n"}
TROUBLES = [
    ("bad image", container({"waiting": {"reason": "ImagePullBackOff"}}), "ImagePullFailed", "img:1", True),
    ("a start failure in the runtime's words", container(BACKOFF, SAID), "ModelNotFound", "no folder /m", True),
    ("the same while it is tried once more", container({"running": {}}, SAID), "ModelNotFound", "check model.uri", False),
    ("a crash, of whose log the last line counts", container(BACKOFF, LOG), "CrashLoop", "ValueError: boom", True),
    ("out of memory", container(BACKOFF, {"exitCode": 137, "reason": "OOMKilled"}), "OutOfMemory", "raise resources.limits.memory", True),
    (
        "a missing config map",
        container({"waiting": {"reason": "CreateContainerConfigError", "message": "no cm"}}),
        "ContainerCannotStart",
        "no cm",
        True,
    ),
]


@pytest.mark.parametrize(("name", "statuses", "reason", "text", "lasting"), TROUBLES, ids=[t[0] for t in TROUBLES])
def test_a_container_tells_its_trouble(name: str, statuses: list[dict[str, Any]], reason: str, text: str, lasting: bool) -> None:
    found = find_trouble(pod(containerStatuses=statuses))
    assert found is not None and (found.reason, found.is_lasting) == (reason, lasting)
    assert text in found.message and "p-0" in found.message and "back-off" not in found.message


def test_an_unschedulable_pod_says_what_the_scheduler_says() -> None:
    conditions = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes are available: 1 Insufficient cpu."}]
    found = find_trouble(pod(conditions=conditions))
    assert found is not None and found.reason == "Unschedulable" and "Insufficient cpu; add capacity" in found.message


def test_a_starting_pod_and_one_that_ended_well_have_no_trouble() -> None:
    assert find_trouble(pod()) is None
    assert find_trouble(pod(containerStatuses=container({"waiting": {"reason": "ContainerCreating"}}))) is None
    assert find_trouble(pod(containerStatuses=container({"running": {}}, {"exitCode": 0}))) is None


def service(name: str, created: str, served: str = "", namespace: str = "ns") -> dict[str, Any]:
    meta = {"name": name, "namespace": namespace, "creationTimestamp": created, "resourceVersion": "1"}
    return {"metadata": meta, "spec": {"model": {"uri": "simulated://", **({"name": served} if served else {})}}}


def test_a_short_name_belongs_to_the_oldest_and_passes_on_when_it_goes() -> None:
    served = ServedNames()
    served.update(service("new", "2026-01-02T00:00:00Z", "m"))
    assert served.holder(Key("ns", "new")) == ""
    assert served.update(service("old", "2026-01-01T00:00:00Z", "m")) == {Key("ns", "new")}
    assert served.holder(Key("ns", "new")) == "ns/old" and served.holder(Key("ns", "old")) == ""
    assert served.remove(Key("ns", "old")) == {Key("ns", "new")}
    assert served.holder(Key("ns", "new")) == ""


def test_a_full_name_belongs_to_its_service_however_young() -> None:
    served = ServedNames()
    served.update(service("thief", "2026-01-01T00:00:00Z", "ns/real"))
    served.update(service("real", "2026-01-02T00:00:00Z"))
    assert served.holder(Key("ns", "thief")) == "ns/real" and served.holder(Key("ns", "real")) == ""


BAD = [
    ({"max-rows": "0"}, "spec.engine.args.max-rows"),
    ({"max-rows": "many"}, "got 'many'"),
    ({"log-level": "loud"}, "'debug', 'info', 'warning' or 'error'"),
    ({"debug-checks": "perhaps"}, "spec.engine.args.debug-checks"),
    ({"nope": "1"}, "allowed: executor"),
]


@pytest.mark.parametrize(("args", "text"), BAD)
def test_values_of_flags_are_checked_as_the_runtime_would(args: dict[str, str], text: str) -> None:
    spec, violations = validate(Key("ns", "s"), {"model": {"uri": "simulated://"}, "unified": {}, "engine": {"args": args}})
    assert spec is None and text in " ".join(map(str, violations))


def test_all_faults_of_a_spec_are_told_at_once() -> None:
    _, violations = validate(Key("ns", "s"), {"model": {}, "unified": {"replicas": "x"}})
    assert {v.path for v in violations} == {"spec.model.uri", "spec.unified.replicas"}


@pytest.mark.parametrize("raw", [{}, {"model": None}, {"model": {"uri": "simulated://"}}, {"model": {"uri": "simulated://"}, "prefill": {}}])
def test_a_spec_from_an_older_crd_is_refused_and_does_no_harm(raw: dict[str, Any]) -> None:
    spec, violations = validate(Key("ns", "s"), raw)
    assert spec is None and violations


def test_settings_come_from_flags_and_the_pods_environment() -> None:
    found = parse(["--runtime-image", "i", "--watch-namespace", "a"], {"RADIXFLEET_POD_NAME": "op-1", "RADIXFLEET_NAMESPACE": "sys"})
    assert found.url == "http://radixfleet-router.sys/v1" and found.watch_namespaces == ("a",) and found.identity.startswith("op-1_")


@pytest.mark.parametrize("argv", [[], ["--runtime-image", "i", "--workers", "0"], ["--runtime-image", "i", "--log-level", "x"]])
def test_a_bad_flag_stops_the_start_with_a_message(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(argv, {})
    assert stop.value.code == 2 and "radixfleet-operator" in capsys.readouterr().err


async def test_health_answers_what_is_wrong() -> None:
    faults: dict[str, str | None] = {"alive": None, "ready": "no listing yet"}
    server = HealthServer(alive=lambda: faults["alive"], ready=lambda: faults["ready"], metrics=lambda: "radixfleet_operator_leader 1\n")
    port = await server.start("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession() as http:
            for path, status, text in [("livez", 200, "ok"), ("readyz", 503, "no listing yet"), ("metrics", 200, "leader 1")]:
                async with http.get(f"http://127.0.0.1:{port}/{path}") as answer:
                    assert answer.status == status and text in await answer.text()
    finally:
        await server.stop()
