"""The Lease: one holder, no write after its deadline, no trust in anybody's wall clock."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from fleet_operator.cluster import LEASE, Cluster
from fleet_operator.errors import ClusterError, LeaseLost
from fleet_operator.leader import NAME, Elector
from fleet_testing.fake_cluster import FakeCluster


class Clock:
    """Seconds that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def elector(cluster: FakeCluster, identity: str, clock: Clock, duration_s: int = 15) -> Elector:
    return Elector(cast(Cluster, cluster), namespace="system", identity=identity, duration_s=duration_s, clock=clock)


def holder(cluster: FakeCluster) -> str:
    return str(cluster.objects["Lease", "system", NAME]["spec"]["holderIdentity"])


async def test_the_first_takes_it_and_the_second_waits() -> None:
    cluster, clock = FakeCluster(), Clock()
    first, second = elector(cluster, "a", clock), elector(cluster, "b", clock)
    await first.acquire()
    assert first.is_leader and not await second._try() and not second.is_leader
    with pytest.raises(LeaseLost):
        second.check()


async def test_a_released_lease_is_taken_at_once() -> None:
    cluster, clock = FakeCluster(), Clock()
    first, second = elector(cluster, "a", clock), elector(cluster, "b", clock)
    await first.acquire()
    await first.release()
    assert holder(cluster) == "" and not first.is_leader
    assert await second._try() and second.is_leader


async def test_a_dead_leader_is_followed_only_after_its_whole_duration_and_never_while_it_may_write() -> None:
    cluster, clock = FakeCluster(), Clock()
    first, second = elector(cluster, "a", clock), elector(cluster, "b", clock)
    await first.acquire()
    while not await second._try():
        clock.now += 0.5
        assert not (first.is_leader and second.is_leader)
    assert clock.now >= 115 and not first.is_leader and holder(cluster) == "b"


async def test_times_in_the_lease_are_not_believed() -> None:
    cluster, clock = FakeCluster(), Clock()
    await elector(cluster, "a", clock).acquire()
    cluster.objects["Lease", "system", NAME]["spec"]["renewTime"] = "1999-01-01T00:00:00.000000Z"
    assert not await elector(cluster, "b", clock)._try()


async def test_a_thawed_leader_may_not_write() -> None:
    cluster, clock = FakeCluster(), Clock()
    frozen = elector(cluster, "a", clock)
    await frozen.acquire()
    frozen.check()
    clock.now += 11
    with pytest.raises(LeaseLost):
        frozen.check()


async def test_holding_ends_when_the_api_server_stays_away_too_long() -> None:
    cluster = FakeCluster()
    leader = Elector(cast(Cluster, cluster), namespace="system", identity="a", duration_s=1)
    await leader.acquire()
    cluster.fail_read = lambda kind: ClusterError(0, "Unreachable", "gone") if kind is LEASE else None
    with pytest.raises(LeaseLost):
        await asyncio.wait_for(leader.hold(), 20)


async def test_holding_ends_when_another_has_it() -> None:
    cluster = FakeCluster()
    leader = Elector(cast(Cluster, cluster), namespace="system", identity="a", duration_s=1)
    await leader.acquire()
    cluster.objects["Lease", "system", NAME]["spec"]["holderIdentity"] = "b"
    with pytest.raises(LeaseLost):
        await asyncio.wait_for(leader.hold(), 20)


async def test_of_two_that_try_at_once_one_gets_it() -> None:
    cluster, clock = FakeCluster(), Clock()
    found = await asyncio.gather(*(elector(cluster, f"e{i}", clock)._try() for i in range(5)))
    assert sum(found) == 1
