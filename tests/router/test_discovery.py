"""Objects of the API server to facts, and the loop that keeps them fresh, with a scripted source."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from fleet_contract import names
from fleet_router.control.discovery import PODS, SERVICES, Discovery, Gone, Json, SourceError, observe, pod_facts, service_facts
from fleet_router.observed import Observed, PodFacts, RouterFacts, ServiceFacts


def pod(name: str = "p0", **changes: Any) -> dict[str, Any]:
    o: dict[str, Any] = {
        "metadata": {
            "name": name,
            "namespace": "demo",
            "uid": f"uid-{name}",
            "labels": {
                names.LABEL_COMPONENT: "worker",
                names.LABEL_SERVICE: "chat",
                names.LABEL_ROLE: "prefill",
                names.LABEL_REVISION: "5f3a9c1e",
            },
        },
        "status": {"podIP": "10.0.0.7", "phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    }
    o["metadata"] |= changes.pop("metadata", {})
    o["status"] |= changes.pop("status", {})
    return o


def service(name: str = "chat", **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "demo", "uid": f"uid-{name}", "generation": 3, "creationTimestamp": "2026-01-02T00:00:00Z"},
        "spec": {"model": {"name": "smollm2"}},
        "status": status,
    }


READY = PodFacts("uid-p0", "p0", "demo", "chat", "prefill", "5f3a9c1e", "10.0.0.7", ready=True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"status": {"conditions": [{"type": "Ready", "status": "False"}]}}, {"ready": False}),
        ({"status": {"conditions": None}}, {"ready": False}),
        ({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}, {"deleting": True}),
        ({"metadata": {"annotations": {names.ANNOTATION_DRAINING: "2026-01-01T00:00:09Z"}}}, {"drain_deadline": "2026-01-01T00:00:09Z"}),
        ({"status": {"phase": "Failed"}}, {"terminal": True}),
        ({"status": {"podIP": None}}, {"ip": ""}),
    ],
    ids=["ready", "not ready", "no conditions", "deleting", "draining", "failed", "no address"],
)
def test_a_pod_becomes_facts(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    assert pod_facts(pod(**changes)) == PodFacts(**{f: getattr(READY, f) for f in READY.__struct_fields__} | expected)


def test_a_pod_without_our_labels_is_no_worker() -> None:
    assert pod_facts(pod(metadata={"labels": {names.LABEL_COMPONENT: "router"}})) is None
    assert pod_facts({"metadata": {}}) is None


def test_router_pods_are_peers_whatever_their_namespace() -> None:
    labels = {names.LABEL_COMPONENT: "router", names.LABEL_NAME: names.APP_NAME}
    routers = {n: pod(n, metadata={"labels": labels, "namespace": n}) for n in ("a", "b")} | {
        "x": pod("x", metadata={"labels": {**labels, names.LABEL_NAME: "other"}})
    }
    routers["b"]["status"]["phase"] = "Failed"
    observed = observe({}, {**routers, "p0": pod()})
    assert observed.routers == [RouterFacts("uid-a", "10.0.0.7"), RouterFacts("uid-b", "10.0.0.7", terminal=True)]
    assert observed.pods == [READY]


def test_a_service_becomes_facts() -> None:
    facts = service_facts(service(traffic=[{"revision": "aa", "weight": 90}, {"revision": "bb", "weight": 10}]))
    assert facts == ServiceFacts("demo", "chat", "uid-chat", "2026-01-02T00:00:00Z", 3, "smollm2", traffic=[("aa", 90), ("bb", 10)])


@pytest.mark.parametrize("traffic", [None, "all", [{"revision": 1}], [{"weight": 5}], [3]])
def test_odd_traffic_counts_as_none(traffic: Any) -> None:
    assert service_facts(service(traffic=traffic)).traffic == []


def test_a_service_without_a_model_name_is_served_under_its_own() -> None:
    assert service_facts({"metadata": {"name": "x", "namespace": "n"}, "spec": {"model": {}}}).model_name == "x"


@pytest.mark.parametrize(
    ("roles", "off"),
    [
        ({"prefill": {"replicas": 0}, "decode": {"replicas": 0}}, True),
        ({"unified": {"replicas": 0}}, True),
        ({"unified": {"replicas": 1}}, False),
        ({"unified": {}}, False),
        ({"prefill": {"replicas": 0}, "decode": {}}, False),
        ({}, False),
        ({"unified": "x"}, False),
    ],
)
def test_a_service_is_off_when_all_its_roles_are_set_to_zero(roles: dict[str, Any], off: bool) -> None:
    assert service_facts({"metadata": {"name": "x", "namespace": "n"}, "spec": roles}).is_off is off


def test_snapshots_do_not_depend_on_the_order_of_events() -> None:
    a, b = pod("a"), pod("b")
    assert observe({}, {"1": a, "2": b}) == observe({}, {"2": b, "1": a})


class ScriptedSource:
    """Lists from `objects`; each watch plays the next script: events, or an error to raise."""

    def __init__(self) -> None:
        self.objects: dict[str, list[Json]] = {SERVICES: [service()], PODS: [pod()]}
        self.watches: dict[str, list[list[Any]]] = {SERVICES: [], PODS: []}
        self.lists = {SERVICES: 0, PODS: 0}
        self.fail_lists = 0

    async def connect(self) -> ScriptedSource:
        return self

    async def list(self, kind: str) -> tuple[list[Json], str]:
        self.lists[kind] += 1
        if self.fail_lists:
            self.fail_lists -= 1
            raise SourceError("connection refused")
        return list(self.objects[kind]), "7"

    async def watch(self, kind: str, resource_version: str) -> AsyncIterator[tuple[str, Json]]:
        script = self.watches[kind].pop(0) if self.watches[kind] else [None]
        for step in script:
            if step is None:
                await asyncio.Event().wait()
            elif isinstance(step, Exception):
                raise step
            else:
                yield step

    async def close(self) -> None:
        pass


async def run_until(source: ScriptedSource, wanted: Any, relist_s: float = 100.0) -> list[Observed]:
    """Runs discovery until a snapshot satisfies `wanted`; gives all snapshots."""
    got: list[Observed] = []
    done = asyncio.Event()

    def publish(observed: Observed) -> None:
        got.append(observed)
        if wanted(observed):
            done.set()

    task = asyncio.create_task(Discovery(source.connect, publish, relist_s).run())
    try:
        await asyncio.wait_for(done.wait(), 10)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return got


async def test_the_first_snapshot_holds_services_and_pods() -> None:
    got = await run_until(ScriptedSource(), lambda o: True)
    assert [s.name for s in got[0].services] == ["chat"]
    assert got[0].pods == [READY]


async def test_a_draining_annotation_is_told_at_once() -> None:
    source = ScriptedSource()
    source.watches[PODS] = [[("MODIFIED", pod(metadata={"annotations": {names.ANNOTATION_DRAINING: "D"}})), None]]
    got = await run_until(source, lambda o: o.pods[0].drain_deadline == "D")
    assert len(got) == 2


async def test_a_deleted_pod_leaves_and_bookmarks_change_nothing() -> None:
    source = ScriptedSource()
    source.watches[PODS] = [[("BOOKMARK", {"metadata": {"resourceVersion": "9"}}), ("DELETED", pod()), None]]
    got = await run_until(source, lambda o: not o.pods)
    assert len(got) == 2


async def test_gone_lists_again() -> None:
    source = ScriptedSource()
    source.watches[PODS] = [[Gone("too old")]]

    def wanted(o: Observed) -> bool:
        source.objects[PODS] = [pod(), pod("p1")]
        return len(o.pods) == 2

    await run_until(source, wanted)
    assert source.lists[PODS] == 2


async def test_the_last_snapshot_stays_while_the_api_server_is_away() -> None:
    source = ScriptedSource()
    source.watches[PODS] = [[SourceError("reset"), None]]

    def wanted(o: Observed) -> bool:
        source.fail_lists, source.objects[PODS] = 1, [pod(), pod("p1")]
        return len(o.pods) == 2

    got = await run_until(source, wanted)
    assert [len(o.pods) for o in got] == [1, 2]


@pytest.mark.rule("R17")
async def test_a_lost_event_is_found_by_the_next_list() -> None:
    source = ScriptedSource()

    def wanted(o: Observed) -> bool:
        source.objects[PODS] = []
        return not o.pods

    await run_until(source, wanted, relist_s=0.2)
