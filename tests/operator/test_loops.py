"""Events into the queue, listings that repair what events missed, and workers that survive whatever a look does."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, cast

import pytest

from fleet_operator.cluster import INFERENCE_SERVICE, Cluster, Kind, TokenBucket
from fleet_operator.errors import ClusterError, LeaseLost
from fleet_operator.facts import Key
from fleet_operator.handlers import build_registry, build_settings
from fleet_operator.loops import MISSED_LIMIT, Inbox, Resync, work
from fleet_operator.metrics import Metrics
from fleet_operator.reconcile import Reconciler
from fleet_operator.served_names import ServedNames
from fleet_operator.settings import parse
from fleet_operator.workqueue import WorkQueue
from fleet_testing.fake_cluster import FakeCluster
from fleet_testing.operator_world import pair

CHAT = Key("demo", "chat")


class Parts:
    """An inbox with its queue, and a listing over a FakeCluster."""

    def __init__(self, namespaces: tuple[str, ...] = ()) -> None:
        self.cluster, self.queue, self.served, self.metrics = FakeCluster(), WorkQueue(), ServedNames(), Metrics()
        self.inbox = Inbox(self.queue, self.served, namespaces)
        self.resync = Resync(cast(Cluster, self.cluster), self.inbox, self.metrics, namespaces)

    async def drain(self) -> set[Key]:
        found = set()
        while len(self.queue):
            key = await self.queue.get()
            self.queue.done(key)
            found.add(key)
        return found


async def test_any_event_enqueues_its_service_once() -> None:
    parts = Parts()
    obj = parts.cluster.put_service("chat", pair())
    parts.inbox.service(obj, is_deleted=False)
    parts.inbox.child("demo", "chat")
    parts.inbox.router()
    assert await parts.drain() == {CHAT}


async def test_other_namespaces_are_left_alone() -> None:
    parts = Parts(namespaces=("mine",))
    parts.inbox.child("demo", "chat")
    parts.inbox.child("mine", "chat")
    assert await parts.drain() == {Key("mine", "chat")}


async def test_a_change_of_a_shared_name_enqueues_the_rival() -> None:
    parts = Parts()
    spec = pair(model={"uri": "simulated://", "name": "m"})
    for name in ("a", "b"):
        parts.inbox.service(parts.cluster.put_service(name, spec), is_deleted=False)
    await parts.drain()
    parts.inbox.service(parts.cluster.service("a"), is_deleted=True)
    assert await parts.drain() == {Key("demo", "a"), Key("demo", "b")}


async def test_a_listing_finds_what_no_event_told_and_says_so_when_it_lasts() -> None:
    parts = Parts()
    parts.cluster.put_service("chat", pair())
    for turn in range(MISSED_LIMIT + 1):
        await parts.resync.once()
        assert await parts.drain() == {CHAT}
        assert parts.resync.missed_in_a_row == turn
    assert parts.metrics.watch_missed == MISSED_LIMIT
    parts.inbox.service(parts.cluster.service("chat"), is_deleted=False)
    await parts.resync.once()
    assert parts.resync.missed_in_a_row == 0


async def test_a_service_that_went_unnoticed_is_looked_at_once_more() -> None:
    parts = Parts()
    parts.inbox.service(parts.cluster.put_service("chat", pair()), is_deleted=False)
    await parts.drain()
    parts.cluster.remove(INFERENCE_SERVICE, "demo", "chat")
    await parts.resync.once()
    assert await parts.drain() == {CHAT} and parts.served.known() == set()


class Looks:
    """A reconciler that does what a test says, look by look."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes, self.seen = list(outcomes), asyncio.Event()

    async def reconcile(self, key: Key) -> float | None:
        outcome = self.outcomes.pop(0)
        if not self.outcomes:
            self.seen.set()
        if isinstance(outcome, BaseException):
            raise outcome
        return cast("float | None", outcome)


async def run(looks: Looks) -> tuple[WorkQueue, Metrics]:
    queue, metrics = WorkQueue(jitter=lambda: 0.0), Metrics()
    queue.add(CHAT)
    worker = asyncio.create_task(work(queue, cast(Reconciler, looks), metrics))
    await asyncio.wait_for(looks.seen.wait(), 20)
    for _ in range(3):
        await asyncio.sleep(0)
    worker.cancel()
    await asyncio.gather(worker, return_exceptions=True)
    return queue, metrics


async def test_a_look_that_fails_or_crashes_is_tried_again() -> None:
    queue, metrics = await run(Looks(ClusterError(500, "x", "down"), ValueError("ours"), 0.0, None))
    assert metrics.looks == {"failed": 1, "crashed": 1, "ok": 2} and len(queue) == 0


async def test_a_lost_lease_ends_the_worker_at_once() -> None:
    queue, metrics = WorkQueue(), Metrics()
    queue.add(CHAT)
    with pytest.raises(LeaseLost):
        await asyncio.wait_for(work(queue, cast(Reconciler, Looks(LeaseLost("gone"))), metrics), 20)


def test_metrics_are_printed_with_their_labels() -> None:
    metrics = Metrics()
    metrics.looks["ok"] += 2
    cluster_calls = Counter({("PATCH", 200): 3})
    text = metrics.text(queue_depth=4, is_leader=True, calls=cluster_calls)
    assert 'radixfleet_operator_reconciles_total{result="ok"} 2' in text
    assert 'radixfleet_operator_api_calls_total{verb="PATCH",status="200"} 3' in text and "radixfleet_operator_queue_depth 4" in text


def test_calls_beyond_the_burst_wait() -> None:
    now = 0.0
    bucket = TokenBucket(rate=10, burst=3, clock=lambda: now)
    assert [bucket.reserve() for _ in range(5)] == pytest.approx([0, 0, 0, 0.1, 0.2])
    now = 10.0
    assert [bucket.reserve() for _ in range(4)] == pytest.approx([0, 0, 0, 0.1])


def test_paths_of_the_api() -> None:
    assert INFERENCE_SERVICE.path("ns", "a", "status") == "/apis/radixfleet.io/v1alpha1/namespaces/ns/inferenceservices/a/status"
    assert Kind("v1", "Pod", "pods").path(None) == "/api/v1/pods"


def test_kopf_gets_only_low_level_handlers_so_that_it_never_writes() -> None:
    settings = parse(["--runtime-image", "i"], {})
    registry = build_registry(Parts().inbox, settings)
    assert not registry._changing._handlers and not registry._spawning._handlers and len(registry._watching._handlers) == 6
    found = build_settings()
    assert found.posting.enabled is False and found.scanning.disabled is True and found.watching.inactivity_timeout == 70
