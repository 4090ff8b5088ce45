"""Limits of callers that several edges and routers give out together: shares that follow the traffic, and never more than the limit."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_router.decide.load import LoadTable
from fleet_router.decide.peers import PeerBook
from fleet_router.decide.shares import FLOOR, ShareBook, Use, differs, split
from fleet_router.edge.callers import Bucket
from fleet_testing.router_fleet import MakeWorker
from fleet_testing.router_process import RouterProcess, until_async

NAME = "key.requests"


@given(st.dictionaries(st.text(max_size=3), st.floats(0, 1e6), min_size=1, max_size=9), st.floats(0.01, 1.0))
def test_a_split_adds_up_and_leaves_nobody_without(demands: dict[str, float], total: float) -> None:
    shares = split(demands, total)
    assert sum(shares.values()) == pytest.approx(total)
    assert all(share >= total * FLOOR / len(demands) - 1e-12 for share in shares.values())


class Edges:
    """Buckets of one limit at the edges of one router, and the brain's book. Messages need no time, or one of `late` steps."""

    def __init__(self, limit: float, count: int) -> None:
        self.limit = limit
        self.book = ShareBook(count)
        self.buckets = {f"e{n}": Bucket.full(limit, 0.0, 1 / count) for n in range(count)}
        self.sent: dict[str, tuple[float, dict[str, float]]] = {}
        for edge in self.buckets:
            self.book.join(edge)

    def ask(self, edge: str, units: float, now: float) -> bool:
        bucket = self.buckets[edge]
        if bucket.wait_s(units, now):
            return False
        bucket.take(units)
        return True

    def report(self, edge: str, now: float) -> None:
        """As `QuotaReports` and `LimitKeeper` do it."""
        bucket = self.buckets[edge]
        use = Use(NAME, bucket.wanted, bucket.released)
        bucket.wanted = bucket.released = 0.0
        handed = self.book.take(edge, [use], now)
        share, by_edge = self.book.shares(now)
        lost = []
        for other in sorted(by_edge, key=lambda e: sum(by_edge[e].values())):
            new = (share, by_edge[other])
            if other in handed or differs(self.sent.get(other), new):
                self.sent[other] = new
                self.buckets[other].set_share(by_edge[other].get(NAME, share), now)
                self.buckets[other].take(-handed.get(other, {}).get(NAME, 0.0))
                if self.buckets[other].released:
                    lost.append(other)
        for other in lost:
            self.report(other, now)


@settings(max_examples=150, deadline=None)
@given(
    limit=st.integers(2, 5000),
    count=st.integers(1, 5),
    steps=st.lists(st.tuples(st.integers(0, 4), st.floats(0, 20), st.integers(1, 40), st.booleans()), max_size=120),
)
def test_all_edges_together_give_no_more_than_one_bucket_would(limit: int, count: int, steps: list[tuple[int, float, int, bool]]) -> None:
    edges, now, given_units = Edges(limit, count), 0.0, 0.0
    for at, pause, units, reports in steps:
        now += pause
        edge = f"e{at % count}"
        if units <= limit and edges.ask(edge, units, now):
            given_units += units
        if reports:
            edges.report(edge, now)
            whole = sum(max(0.0, b.level) for b in edges.buckets.values())
            assert whole <= limit + count, "moving shares makes no units"
        # a bucket holds at least one unit, and lends the rest of a request that is larger than itself
        bound = (limit + count) * (1 + now / 60) + count * 40
        assert given_units <= bound + 1e-6


def test_whoever_gets_all_the_traffic_gets_nearly_the_whole_limit_at_once_and_later() -> None:
    edges, now, given_units = Edges(600, 2), 0.0, 0
    for n in range(1200):  # ten a second for two minutes
        now = n / 10
        given_units += edges.ask("e0", 1, now)
        edges.report("e0", now)
    assert given_units >= 0.95 * 1200, "one bucket would have given all: 600 at once, and 600 a minute"
    assert edges.ask("e1", 1, now), "and the other still serves who comes"
    for _ in range(600):
        now += 0.1
        edges.ask("e1", 1, now)
        edges.report("e1", now)
    assert edges.buckets["e1"].per_minute > 0.9 * 600, "the share follows"


def test_without_demand_all_edges_are_equal_again() -> None:
    book = ShareBook(2)
    for edge in ("a", "b"):
        book.join(edge)
    book.take("a", [Use(NAME, 100.0)], 0.0)
    assert book.shares(0.0)[1]["a"][NAME] == pytest.approx(0.95)
    assert book.shares(200.0) == (0.5, {"a": {}, "b": {}})
    assert not differs((0.5, {}), (0.5, {NAME: 0.5})) and differs((0.5, {}), (0.5, {NAME: 0.6}))


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 1000)), max_size=20), st.integers(1, 3))
def test_routers_that_hear_one_another_share_one_limit(asked: list[tuple[int, float]], edges: int) -> None:
    books = [ShareBook(edges) for _ in range(3)]
    peers = [PeerBook(LoadTable(), f"r{n}", limits=book) for n, book in enumerate(books)]
    for n, book in enumerate(books):
        peers[n].expect([str(m) for m in range(3) if m != n])
        for e in range(edges):
            book.join(f"e{e}")
    for n, units in asked:
        books[n].take("e0", [Use(NAME, units)], 1.0)
    for n, peer in enumerate(peers):
        message = peer.everything(1.0)
        for other in peers:
            other.take(str(n), message, 1.0)
    given_shares = []
    for book in books:
        share, by_edge = book.shares(1.0)
        given_shares += [s.get(NAME, share) for s in by_edge.values()]
    assert sum(given_shares) == pytest.approx(1.0)
    peers[0].take("1", peers[1].farewell(), 1.0)
    peers[0].take("2", peers[2].farewell(), 1.0)
    share, by_edge = books[0].shares(1.0)
    assert sum(s.get(NAME, share) for s in by_edge.values()) == pytest.approx(1.0), "who is alone has the whole"


@pytest.mark.processes
async def test_an_edge_that_gets_all_the_traffic_gives_nearly_the_whole_limit(
    make_worker: MakeWorker, make_router: Callable[..., Awaitable[RouterProcess]], tmp_path: Path
) -> None:
    limit = 60
    keys = tmp_path / "keys"
    keys.write_text(json.dumps({"key": "rf-0123456789", "requestsPerMinute": limit}) + "\n" + json.dumps({"key": "other-key-123"}))
    worker = await make_worker()
    router = await make_router("--static", worker.url, "--workers", "2", "--api-key-file", str(keys))
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    head = {"authorization": "Bearer rf-0123456789"}
    statuses: list[int] = []
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=1), trust_env=False, timeout=30.0) as one:  # one connection: one edge

        async def ask() -> bool:
            answer = await one.post(f"{router.url}/v1/chat/completions", json=body, headers=head)
            statuses.append(answer.status_code)
            return statuses.count(200) >= 0.8 * limit

        await until_async(ask, "one edge gave what two had", 15.0)
        assert set(statuses) <= {200, 429}
    assert statuses.count(200) <= limit * 1.5 + 2, statuses
