"""Everything is restarted while requests come in, and none fails; two routers are peers and share what they know."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from fleet_local.api import ClusterClient
from fleet_local.install import checkout, install_chart
from fleet_testing.fleet import Fleet
from fleet_testing.rolling import VALUES, roll

pytestmark = pytest.mark.e2e


@pytest.fixture
def two_routers(fleet: Fleet, cluster: ClusterClient, chart_values: dict[str, str]) -> Iterator[Fleet]:
    """The chart with `router.replicas` 2."""
    install_chart(cluster, checkout(), {**chart_values, **VALUES})
    yield fleet
    install_chart(cluster, checkout(), chart_values)


@pytest.mark.skipif(not os.environ.get("RADIXFLEET_ROLLING"), reason="a long test that wants a quiet node: RADIXFLEET_ROLLING=1, or make rolling")
@pytest.mark.rule("R33")
@pytest.mark.rule("R38")
async def test_restarts_of_routers_workers_and_operator_under_50_requests_a_second_fail_none(two_routers: Fleet, namespace: str) -> None:
    """The faults that it found have tests of their own that fail each time: tests/router/test_drain.py, test_relay.py. It needs the node for
    itself: two generations of all its workers do not fit beside those of other tests."""
    report = await roll(two_routers, namespace)
    assert report.is_clean, report.table()
    assert report.load.sent > 500
