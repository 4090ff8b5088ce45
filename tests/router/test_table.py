"""Names, revisions and reports of the table."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fleet_contract.worker import Profile, WorkerRecord
from fleet_router.brain.registry import Endpoint, worker_state
from fleet_router.brain.reports import fleet_report
from fleet_router.brain.worker import Worker
from fleet_router.decide.load import LoadTable, Speed
from fleet_router.metrics import number
from fleet_router.observed import PodFacts, ServiceFacts
from fleet_router.table import Service, Table, name_table, static_services


def worker(slot: int, *, role: str = "unified", revision: str = "aa", state: str = "ready", service: str = "chat", **more: Any) -> Worker:
    record = WorkerRecord(pod_uid=f"u{slot}", namespace="demo", service=service, role=role, revision=revision, served_names=[service])
    return Worker(
        slot, "127.0.0.1", record, ("demo", service), f"pod{slot}", load=LoadTable().add(slot, Speed.of(Profile(), 1000)), state=state, **more
    )


def facts(namespace: str, name: str, created: str, model: str = "m") -> ServiceFacts:
    return ServiceFacts(namespace, name, created=created, model_name=model)


def test_the_oldest_service_has_the_short_name_and_long_names_always_work() -> None:
    table = name_table([facts("b", "young", "2026-02-01T00:00:00Z"), facts("a", "old", "2026-01-01T00:00:00Z")])
    assert table == {"m": ("a", "old"), "a/old": ("a", "old"), "b/young": ("b", "young")}


def test_the_next_oldest_gets_the_short_name_when_the_oldest_is_deleted() -> None:
    table = Table()
    old, young = facts("a", "old", "2026-01-01T00:00:00Z"), facts("b", "young", "2026-02-01T00:00:00Z")
    table.rebuild([old, young], [])
    table.rebuild([young], [])
    assert table.names["m"] == ("b", "young")


@pytest.mark.parametrize(
    ("roles", "units"),
    [
        ([("prefill", "aa", "ready"), ("decode", "aa", "ready")], {"aa": 1}),
        ([("prefill", "aa", "ready"), ("decode", "bb", "ready")], {}),
        ([("prefill", "aa", "ready"), ("prefill", "aa", "ready"), ("decode", "aa", "ready")], {"aa": 1}),
        ([("unified", "aa", "ready"), ("unified", "bb", "draining")], {"aa": 1}),
        ([("prefill", "aa", "ready"), ("decode", "aa", "stalled")], {}),
    ],
    ids=["a pair", "two revisions never pair", "the scarcer role counts", "draining takes nothing", "stalled takes nothing"],
)
def test_ready_units_of_revisions(roles: list[tuple[str, str, str]], units: dict[str, int]) -> None:
    service = Service(facts("demo", "chat", ""), [worker(n, role=r, revision=v, state=s) for n, (r, v, s) in enumerate(roles)])
    assert service.ready_units() == units


def test_a_removed_worker_is_listed_until_nothing_is_in_flight() -> None:
    gone = worker(0, removed=True, inflight=1)
    service = Service(facts("demo", "chat", ""), [gone, worker(1, drain_deadline="D", state="draining")])
    report = fleet_report(service, router_id="r", synced=True, queued={})
    assert [(w.pod, w.state, w.inflight, w.drain_deadline) for w in report.revisions["aa"].workers] == [
        ("pod0", "failed", 1, None),
        ("pod1", "draining", 0, "D"),
    ]
    gone.inflight = 0
    assert [w.pod for w in fleet_report(service, router_id="r", synced=True, queued={}).revisions["aa"].workers] == ["pod1"]


def test_weights_of_revisions_without_workers_are_reported_too() -> None:
    service = Service(msgspec.structs.replace(facts("demo", "chat", ""), traffic=[("aa", 100), ("bb", 0)]), [worker(0)])
    report = fleet_report(service, router_id="r", synced=True, queued={"aa": 2})
    assert {rev: (r.weight, r.queued) for rev, r in report.revisions.items()} == {"aa": (100, 2), "bb": (0, 0)}


def test_pods_that_have_not_told_their_record_are_listed_with_their_deadline() -> None:
    service = Service(facts("demo", "chat", ""), [worker(0)])
    pods = [
        PodFacts("u0", "pod0", "demo", "chat", "unified", "aa", ready=True),
        PodFacts("u1", "pod1", "demo", "chat", "unified", "aa"),
        PodFacts("u2", "pod2", "demo", "chat", "unified", "bb", drain_deadline="D"),
        PodFacts("u3", "pod3", "demo", "chat", "unified", "bb", terminal=True),
    ]
    report = fleet_report(service, router_id="r", synced=True, queued={}, pods=pods)
    listed = {rev: [(w.pod, w.state, w.drain_deadline) for w in r.workers] for rev, r in report.revisions.items()}
    assert listed == {
        "aa": [("pod0", "ready", None), ("pod1", "starting", None)],
        "bb": [("pod2", "draining", "D"), ("pod3", "failed", None)],
    }


def test_a_service_that_is_not_served_has_no_revisions() -> None:
    assert fleet_report(None, router_id="r", synced=True, queued={}).revisions == {}


def test_static_workers_answer_to_all_their_served_names() -> None:
    w = worker(0, service="")
    w.service = ("", "default")
    w.record = msgspec.structs.replace(w.record, served_names=["smollm2", "demo/smollm2"])
    assert set(name_table(static_services([w]))) == {"smollm2", "demo/smollm2"}


def test_static_workers_that_name_no_service_form_one() -> None:
    bare = worker(0, service="")
    bare.service = ("", "default")
    bare.record = msgspec.structs.replace(bare.record, served_names=["smollm2"])
    assert [(f.key, f.model_name) for f in static_services([bare])] == [(("", "default"), "smollm2")]


POD = PodFacts("u", "p", "demo", "chat", "prefill", "aa", "10.0.0.1", ready=True)


@pytest.mark.parametrize(
    ("pod", "endpoint", "draining", "state"),
    [
        (None, {"healthy": True}, False, "ready"),
        (None, {}, False, "starting"),
        (None, {"ever_healthy": True}, False, "stalled"),
        (None, {"healthy": True, "answers": True}, True, "draining"),
        (None, {"ever_healthy": True, "answers": True}, True, "draining"),
        (None, {"ever_healthy": True}, True, "stalled"),
        (None, {"ever_healthy": True, "is_drained": True}, False, "stalled"),
        (POD, {"healthy": True}, False, "ready"),
        (msgspec.structs.replace(POD, ready=False), {"healthy": True}, False, "starting"),
        (msgspec.structs.replace(POD, ready=False), {"healthy": True, "ever_healthy": True}, False, "stalled"),
        (msgspec.structs.replace(POD, deleting=True), {"healthy": True}, False, "draining"),
        (msgspec.structs.replace(POD, drain_deadline="D"), {"healthy": True}, False, "draining"),
        (msgspec.structs.replace(POD, terminal=True), {"healthy": True}, False, "failed"),
        (None, {"removed": True}, False, "failed"),
    ],
)
def test_the_state_of_a_worker(pod: PodFacts | None, endpoint: dict[str, bool], draining: bool, state: str) -> None:
    assert worker_state(Endpoint("k", "h", 1, pod, **endpoint), draining=draining) == state


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (123456789.0, "123456789"), (1e15 + 1, "1000000000000001"), (0.25, "0.25"), (1234567.125, "1234567.125")]
)
def test_samples_of_metrics_keep_all_their_digits(value: float, text: str) -> None:
    assert number(value) == text
