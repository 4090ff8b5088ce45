"""The operator under hard conditions: killed, wiped, edited by hand, upgraded, removed. Services go on, and the end is what the spec says."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import pytest

from fleet_contract import names
from fleet_local.api import ClusterClient
from fleet_local.install import RELEASE, checkout, install_chart
from fleet_testing.fleet import Fleet, simulated, wait_for
from fleet_testing.load import steady

pytestmark = pytest.mark.e2e

SYSTEM = names.SYSTEM_NAMESPACE
CHILDREN = ("statefulsets", "services", "configmaps", "controllerrevisions")
STREAM = {"simulated-step-base-ms": "100"}  # ten tokens a second


def slow(name: str, namespace: str, **options: Any) -> dict[str, Any]:
    """A service whose streams take a while."""
    return simulated(name, namespace, args=STREAM, **options)


def patch(fleet: Fleet, name: str, namespace: str, **spec: Any) -> None:
    fleet.kubectl("patch", "infsvc", name, "-n", namespace, "--type=merge", "-p", json.dumps({"spec": spec}))


def uids(objects: list[dict[str, Any]]) -> dict[str, str]:
    return {o["metadata"]["name"]: o["metadata"]["uid"] for o in objects}


def made_for(fleet: Fleet, name: str, namespace: str) -> dict[str, dict[str, Any]]:
    """What the operator made for a service, by kind and name."""
    found = (o for kind in CHILDREN for o in fleet.list(kind, namespace, f"{names.LABEL_SERVICE}={name}"))
    ours = (o for o in found if {r["kind"] for r in o["metadata"].get("ownerReferences", [])} == {names.KIND})
    return {f"{o['kind']} {o['metadata']['name']}": o for o in ours}


def restarts(fleet: Fleet, name: str, namespace: str) -> int:
    return sum(c["restartCount"] for p in fleet.pods(name, namespace) for c in p["status"]["containerStatuses"])


def operator_log(fleet: Fleet) -> str:
    return fleet.kubectl("logs", "-n", SYSTEM, "-l", f"{names.LABEL_COMPONENT}={names.COMPONENT_OPERATOR}", "--tail=-1")


def kill_operator(fleet: Fleet) -> None:
    """SIGKILL, without a word to the API server: the Lease stays held until it runs out."""
    for pod in fleet.list("pods", SYSTEM, f"{names.LABEL_COMPONENT}={names.COMPONENT_OPERATOR}"):
        fleet.kubectl("delete", "pod", pod["metadata"]["name"], "-n", SYSTEM, "--force", "--grace-period=0")


def operator_is_back(fleet: Fleet) -> None:
    fleet.kubectl("rollout", "status", "deployment/radixfleet-operator", "-n", SYSTEM, "--timeout=90s")


async def test_five_second_streams_live_through_scaling_of_both_roles(fleet: Fleet, namespace: str) -> None:
    fleet.apply(slow("drain", namespace, drain_s=60, prefill=1, decode=1))
    await asyncio.to_thread(fleet.wait_ready, "drain", namespace)
    async with steady(fleet.url, f"{namespace}/drain", per_s=5, tokens=50) as load:
        for prefill, decode in ((1, 2), (2, 1), (1, 1)):
            patch(fleet, "drain", namespace, prefill={"replicas": prefill}, decode={"replicas": decode})
            await asyncio.to_thread(fleet.wait_ready, "drain", namespace)
            await asyncio.sleep(1)
    assert load.failed == []
    assert load.ok == load.sent > 50


def test_a_stream_longer_than_the_drain_ends_with_an_error_event_and_its_pod_goes_on_time(fleet: Fleet, namespace: str) -> None:
    fleet.apply(slow("short", namespace, drain_s=3, prefill=1, decode=2))
    fleet.wait_ready("short", namespace)
    victim = sorted(uids(fleet.pods("short", namespace, "decode")))[-1]
    body = {"model": f"{namespace}/short", "max_tokens": 200, "stream": True}

    def stream(number: int) -> tuple[int, str]:
        messages = [{"role": "user", "content": f"{number} " * 100}]  # nothing in common, so that they are spread
        with httpx.stream("POST", f"{fleet.url}/v1/chat/completions", json={**body, "messages": messages}, timeout=60) as answer:
            data = b""
            with suppress(httpx.RemoteProtocolError):  # a cut stream ends without its last chunk
                for part in answer.iter_raw():
                    data += part
            return answer.status_code, data.decode()

    with ThreadPoolExecutor(8) as pool:
        results = pool.map(stream, range(8))
        pods = fleet.pods("short", namespace, "decode")
        wait_for(lambda: all(fleet.metrics(p)["running_requests"] > 0 for p in pods), within_s=20, what="streams on both pods")
        patch(fleet, "short", namespace, decode={"replicas": 1})
        started = time.monotonic()
        wait_for(lambda: victim not in uids(fleet.pods("short", namespace, "decode")), within_s=3 + 5, what=f"{victim} is told to go")
        print(f"gone after {time.monotonic() - started:.1f} s")
        answers = list(results)
    whole = [data for status, data in answers if status == 200 and data.rstrip().endswith("[DONE]")]
    cut = [data for status, data in answers if status == 200 and not data.rstrip().endswith("[DONE]")]
    assert len(whole) + len(cut) == 8 and whole and cut, [data[-300:] for _, data in answers]
    for data in cut:
        last = json.loads(data.rstrip().rpartition("data: ")[2])
        assert last["error"]["message"] and last["error"]["code"], data[-300:]


async def test_an_operator_killed_in_the_middle_of_rollouts_and_drains_fails_no_request(fleet: Fleet, namespace: str) -> None:
    fleet.apply(slow("tough", namespace, drain_s=60, prefill=1, decode=1))
    await asyncio.to_thread(fleet.wait_ready, "tough", namespace)
    async with steady(fleet.url, f"{namespace}/tough", per_s=3, tokens=30) as load:
        for change in ({"engine": {"contextLength": 1024}}, {"decode": {"replicas": 2}}, {"decode": {"replicas": 1}}):
            patch(fleet, "tough", namespace, **change)
            await asyncio.sleep(2)
            await asyncio.to_thread(kill_operator, fleet)
            await asyncio.to_thread(fleet.wait_ready, "tough", namespace)
    assert load.failed == []
    assert load.ok == load.sent > 50
    status = fleet.service("tough", namespace)["status"]
    sets = fleet.list("statefulsets", namespace, f"{names.LABEL_SERVICE}=tough")
    assert {s["metadata"]["labels"][names.LABEL_REVISION] for s in sets} == {status["revision"]} and len(sets) == 2
    assert restarts(fleet, "tough", namespace) == 0


def test_whatever_is_deleted_wiped_or_edited_by_hand_is_put_right_and_no_pod_restarts(fleet: Fleet, namespace: str) -> None:
    fleet.apply(simulated("fixed", namespace, prefill=1, decode=1))
    fleet.wait_ready("fixed", namespace)
    pods, before = uids(fleet.pods("fixed", namespace)), made_for(fleet, "fixed", namespace)
    kinds = sorted(slot.split()[0] for slot in before)
    assert kinds == ["ConfigMap", "ControllerRevision", "Service", "StatefulSet", "StatefulSet"]
    for slot in before:
        kind, name = slot.split()
        if kind == "StatefulSet":
            fleet.kubectl("delete", kind, name, "-n", namespace, "--cascade=orphan")
        else:
            fleet.kubectl("delete", kind, name, "-n", namespace)
        again = wait_for(lambda slot=slot: made_for(fleet, "fixed", namespace).get(slot), within_s=30, what=f"{slot} is made anew")
        assert again["metadata"]["uid"] != before[slot]["metadata"]["uid"]
    (config,) = (slot.split()[1] for slot in before if slot.startswith("ConfigMap"))
    fleet.kubectl("label", "configmap", config, "-n", namespace, f"{names.LABEL_REVISION}=00000000", "--overwrite")
    decode = names.workload_name("fixed", fleet.service("fixed", namespace)["status"]["revision"], names.ROLE_DECODE)
    fleet.kubectl("scale", "statefulset", decode, "-n", namespace, "--replicas=3")
    wait_for(lambda: fleet.get("statefulset", decode, namespace)["spec"]["replicas"] == 1, within_s=60, what="replicas as the spec says")
    fleet.kubectl("patch", "infsvc", "fixed", "-n", namespace, "--subresource=status", "--type=json", "-p", '[{"op":"remove","path":"/status"}]')
    fleet.wait_ready("fixed", namespace, within_s=60)
    label = ("metadata", "labels", names.LABEL_REVISION)
    wait_for(lambda: fleet.get("configmap", config, namespace)[label[0]][label[1]][label[2]] != "00000000", within_s=60, what="the label as it was")
    assert pods.items() <= uids(fleet.pods("fixed", namespace)).items()
    assert restarts(fleet, "fixed", namespace) == 0


def test_an_object_of_somebody_else_is_left_alone_and_named(fleet: Fleet, namespace: str) -> None:
    spec = simulated("mine", namespace, unified=1)
    fleet.apply(spec)
    fleet.wait_ready("mine", namespace)
    config = names.revision_object_name("mine", fleet.service("mine", namespace)["status"]["revision"])
    fleet.kubectl("delete", "infsvc", "mine", "-n", namespace, "--timeout=60s")
    wait_for(lambda: not made_for(fleet, "mine", namespace), within_s=60, what="all objects gone")
    foreign = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": config, "namespace": namespace}, "data": {"theirs": "1"}}
    fleet.apply(foreign)
    uid = fleet.get("configmap", config, namespace)["metadata"]["uid"]
    fleet.apply(spec)

    def conflict() -> str | None:
        found = fleet.condition("mine", namespace, "Ready")
        return str(found["message"]) if found.get("reason") == "OwnershipConflict" else None

    assert config in wait_for(conflict, within_s=30, what="the conflict is told")
    theirs = fleet.get("configmap", config, namespace)
    assert theirs["data"] == {"theirs": "1"} and theirs["metadata"]["uid"] == uid and "ownerReferences" not in theirs["metadata"]
    fleet.kubectl("delete", "configmap", config, "-n", namespace)
    fleet.wait_ready("mine", namespace, within_s=60)


def test_fifty_services_made_and_deleted_at_once_leave_nothing_and_no_error(fleet: Fleet, namespace: str) -> None:
    def make_and_delete(i: int) -> None:
        fleet.apply(simulated(f"a{i}", namespace, prefill=1, decode=1))
        fleet.kubectl("delete", "infsvc", f"a{i}", "-n", namespace, "--wait=false")

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(make_and_delete, range(50)))
    selector = f"{names.LABEL_NAME}={names.APP_NAME}"
    wait_for(
        lambda: not any(fleet.list(kind, namespace, selector) for kind in ("pods", *CHILDREN)) and not fleet.list("infsvc", namespace),
        within_s=120,
        what="nothing is left",
    )
    warnings = [e for e in fleet.list("events", namespace) if e["type"] == "Warning" and e["involvedObject"]["kind"] == names.KIND]
    assert warnings == []
    assert "Traceback" not in operator_log(fleet)


def test_a_service_of_the_same_name_made_while_the_old_one_goes_is_what_its_own_spec_says(fleet: Fleet, namespace: str) -> None:
    fleet.apply(simulated("again", namespace, drain_s=5, prefill=1, decode=1))
    fleet.wait_ready("again", namespace)
    old, pods = fleet.service("again", namespace)["metadata"]["uid"], uids(fleet.pods("again", namespace))
    fleet.kubectl("delete", "infsvc", "again", "-n", namespace, "--wait=false")
    fleet.apply(simulated("again", namespace, drain_s=5, prefill=2, decode=1))
    fleet.wait_ready("again", namespace)
    made = made_for(fleet, "again", namespace)
    new = fleet.service("again", namespace)["metadata"]["uid"]
    assert new != old and {r["uid"] for o in made.values() for r in o["metadata"]["ownerReferences"]} == {new}
    now = uids(fleet.pods("again", namespace))
    assert len(now) == 3 and not set(pods.values()) & set(now.values())


def test_names_of_any_allowed_length_work_end_to_end(fleet: Fleet, namespace: str) -> None:
    services = ["c" * 40, "d" * 52, "e" * 63, "e" * 62 + "f"]
    fleet.apply(*(simulated(name, namespace, unified=1) for name in services))
    for name in services:
        fleet.wait_ready(name, namespace)
        body = {"model": f"{namespace}/{name}", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        assert httpx.post(f"{fleet.url}/v1/chat/completions", json=body, timeout=30).status_code == 200
        assert len(fleet.pods(name, namespace)) == 1
    fleet.kubectl("delete", "infsvc", "--all", "-n", namespace, "--timeout=60s")
    wait_for(lambda: not any(fleet.list(k, namespace, f"{names.LABEL_NAME}={names.APP_NAME}") for k in CHILDREN), within_s=60, what="all gone")


def test_services_at_rest_are_not_written_to(fleet: Fleet, namespace: str) -> None:
    fleet.apply(*(simulated(name, namespace, unified=1) for name in ("one", "two")), simulated("off", namespace, prefill=0, decode=0))
    fleet.wait_ready("one", namespace)
    fleet.wait_ready("two", namespace)
    fleet.wait_condition("off", namespace, "Progressing", "False")

    def versions() -> dict[str, str]:
        objects = [o for kind in ("infsvc", "pods", *CHILDREN, "events") for o in fleet.list(kind, namespace)]
        return {f"{o['kind']} {o['metadata']['name']}": o["metadata"]["resourceVersion"] for o in objects}

    def at_rest() -> dict[str, str] | None:
        before = versions()
        time.sleep(2)
        return before if versions() == before else None

    before = wait_for(at_rest, within_s=60, what="a namespace at rest")
    time.sleep(20)
    assert versions() == before


def test_the_columns_of_kubectl_get_tell_where_a_service_stands(fleet: Fleet, namespace: str) -> None:
    broken = simulated("broken", namespace, unified=1)
    broken["spec"]["unified"]["podTemplate"] = {"nodeSelector": {"no": "such-node"}}
    fleet.apply(simulated("ready", namespace, prefill=1, decode=1), broken, simulated("off", namespace, prefill=0, decode=0))
    fleet.wait_ready("ready", namespace)
    wait_for(lambda: fleet.condition("broken", namespace, "Ready").get("reason") == "Unschedulable", within_s=30, what="Unschedulable")
    wait_for(lambda: fleet.condition("off", namespace, "Ready").get("reason") == "ScaledToZero", within_s=30, what="ScaledToZero")
    rows = [line.split() for line in fleet.kubectl("get", "infsvc", "-n", namespace).splitlines()]
    assert rows[0] == ["NAME", "MODEL", "READY", "PREFILL", "DECODE", "REVISION", "REASON", "URL", "AGE"]
    revision = {name: fleet.service(name, namespace)["status"]["revision"] for name in ("ready", "broken", "off")}
    url = f"http://radixfleet-router.{SYSTEM}/v1"
    assert [row[:-1] for row in rows[1:]] == [
        ["broken", "simulated://", "0/1", revision["broken"], "Unschedulable", url],
        ["off", "simulated://", "0/0", "0/0", "0/0", revision["off"], "ScaledToZero", url],
        ["ready", "simulated://", "2/2", "1/1", "1/1", revision["ready"], "Ready", url],
    ]


def test_upgrade_uninstall_and_install_of_the_chart_touch_no_model_pod(
    fleet: Fleet, cluster: ClusterClient, chart_values: dict[str, str], namespace: str
) -> None:
    fleet.apply(simulated("steady", namespace, prefill=1, decode=1))
    fleet.wait_ready("steady", namespace)
    pods, revision = uids(fleet.pods("steady", namespace)), fleet.service("steady", namespace)["status"]["revision"]
    try:
        changed = {**chart_values, "operator.logLevel": "debug", "images.runtime": "localhost/radixfleet/other:dev"}
        assert install_chart(cluster, checkout(), changed)
        patch(fleet, "steady", namespace, decode={"replicas": 2})
        fleet.wait_ready("steady", namespace)
        assert pods.items() < uids(fleet.pods("steady", namespace)).items(), "a revision keeps the image that it was pinned with"
        patch(fleet, "steady", namespace, decode={"replicas": 1})
        fleet.wait_ready("steady", namespace)
        cluster.helm("uninstall", RELEASE, "-n", SYSTEM, "--wait")
        assert fleet.service("steady", namespace)["status"]["revision"] == revision
        assert uids(fleet.pods("steady", namespace)) == pods
    finally:
        install_chart(cluster, checkout(), chart_values)
    body = {"model": f"{namespace}/steady", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    wait_for(lambda: httpx.post(f"{fleet.url}/v1/chat/completions", json=body, timeout=30).status_code == 200, within_s=60, what="it is served again")
    patch(fleet, "steady", namespace, decode={"replicas": 2})
    fleet.wait_ready("steady", namespace)
    assert pods.items() < uids(fleet.pods("steady", namespace)).items()
    assert restarts(fleet, "steady", namespace) == 0
