"""Scaling and changing a service while requests come in: nothing fails that need not."""

from __future__ import annotations

import asyncio
import json
import signal
from datetime import UTC, datetime
from typing import Any

import pytest

from fleet_contract import names
from fleet_testing.fleet import Fleet, simulated, wait_for
from fleet_testing.load import Load, steady

pytestmark = pytest.mark.e2e


async def scale_decode(fleet: Fleet, name: str, namespace: str, replicas: int) -> None:
    patch = json.dumps({"spec": {"decode": {"replicas": replicas}}})
    await asyncio.to_thread(fleet.kubectl, "patch", "infsvc", name, "-n", namespace, "--type=merge", "-p", patch)
    await asyncio.to_thread(fleet.wait_ready, name, namespace)
    await asyncio.to_thread(
        wait_for,
        lambda: len(fleet.ready_pods(name, namespace, "decode")) == len(fleet.pods(name, namespace, "decode")) == replicas,
        within_s=120,
        what=f"{replicas} decode pods",
    )


def served(fleet: Fleet, name: str, namespace: str) -> dict[str, float]:
    """Finished requests of each decode pod."""
    return {p["metadata"]["name"]: fleet.metrics(p)["finished_requests_total"] for p in fleet.ready_pods(name, namespace, "decode")}


async def scale_up_and_down(fleet: Fleet, name: str, namespace: str, model: str, *, per_s: float) -> Load:
    """Decode 1 -> 2 -> 1 under load; both pods must have served while there were two."""
    async with steady(fleet.url, model, per_s=per_s) as load:
        await asyncio.sleep(2)
        await scale_decode(fleet, name, namespace, 2)
        await asyncio.to_thread(
            wait_for, lambda: all(n > 0 for n in served(fleet, name, namespace).values()), within_s=60, what="both decode pods serve"
        )
        await scale_decode(fleet, name, namespace, 1)
        await asyncio.sleep(2)
    return load


async def test_scaling_under_50_requests_a_second_fails_none(fleet: Fleet, namespace: str) -> None:
    fleet.apply(simulated("load", namespace, prefill=1, decode=1))
    await asyncio.to_thread(fleet.wait_ready, "load", namespace)
    load = await scale_up_and_down(fleet, "load", namespace, f"{namespace}/load", per_s=50)
    print(f"{load.ok} of {load.sent} ok, slowest {load.slowest_s:.1f} s")
    assert load.failed == []
    assert load.ok == load.sent > 300


@pytest.mark.model
async def test_scaling_the_real_model_under_one_request_a_second_fails_none(fleet: Fleet, quickstart: None) -> None:
    load = await scale_up_and_down(fleet, "chat", "default", "smollm2", per_s=1)
    print(f"{load.ok} of {load.sent} ok, slowest {load.slowest_s:.1f} s")
    assert load.failed == []
    assert load.ok == load.sent > 5


async def test_a_changed_context_length_makes_a_new_revision_and_nothing_hangs(fleet: Fleet, namespace: str) -> None:
    fleet.apply(simulated("edit", namespace, prefill=1, decode=1))
    await asyncio.to_thread(fleet.wait_ready, "edit", namespace)
    old = fleet.service("edit", namespace)["status"]["revision"]
    async with steady(fleet.url, f"{namespace}/edit", per_s=10) as load:
        await asyncio.sleep(1)
        patch = '{"spec":{"engine":{"contextLength":1024}}}'
        await asyncio.to_thread(fleet.kubectl, "patch", "infsvc", "edit", "-n", namespace, "--type=merge", "-p", patch)
        await asyncio.to_thread(fleet.wait_ready, "edit", namespace)
        await asyncio.sleep(1)
    new = fleet.service("edit", namespace)["status"]["revision"]
    assert new != old
    print(f"{load.ok} of {load.sent} ok, slowest {load.slowest_s:.1f} s, failed {load.failed[:3]}")
    assert all(f.startswith("503 ") for f in load.failed)
    assert load.slowest_s < 30
    sets = fleet.list("statefulsets", namespace, f"{names.LABEL_SERVICE}=edit")
    assert {s["metadata"]["labels"][names.LABEL_REVISION] for s in sets} == {new}
    assert all(fleet.worker(p)["contextLength"] == 1024 for p in fleet.ready_pods("edit", namespace))


async def test_with_a_frozen_router_a_pod_stays_until_its_deadline_and_goes_right_after(fleet: Fleet, namespace: str, freeze_router: Any) -> None:
    drain_s = 12
    fleet.apply(simulated("frozen", namespace, drain_s=drain_s, prefill=1, decode=2))
    await asyncio.to_thread(fleet.wait_ready, "frozen", namespace)
    victim = f"{sorted(p['metadata']['name'] for p in fleet.pods('frozen', namespace, 'decode'))[-1]}"
    with freeze_router(signal.SIGSTOP):
        fleet.kubectl("patch", "infsvc", "frozen", "-n", namespace, "--type=merge", "-p", '{"spec":{"decode":{"replicas":1}}}')

        def deadline() -> str | None:
            pod = fleet.get("pod", victim, namespace)
            return pod["metadata"].get("annotations", {}).get(names.ANNOTATION_DRAINING)  # type: ignore[no-any-return]

        text = await asyncio.to_thread(wait_for, deadline, within_s=10, what="the draining annotation")
        at = datetime.fromisoformat(text.replace("Z", "+00:00"))

        def gone() -> bool:
            return victim not in {p["metadata"]["name"] for p in fleet.pods("frozen", namespace, "decode")}

        while datetime.now(UTC) < at:
            assert not gone() or datetime.now(UTC) >= at, "deleted before its deadline although a router did not answer"
            await asyncio.sleep(0.3)
        await asyncio.to_thread(wait_for, gone, within_s=max(0.1, 3 - (datetime.now(UTC) - at).total_seconds()), what="deletion after the deadline")
