"""End-to-end tests: a cluster by `fleet_local.pytest_plugin`, and the product installed on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fleet_contract.names import ROUTER_SERVICE_NAME, ROUTER_SERVICE_PORT, SYSTEM_NAMESPACE
from fleet_local.api import ClusterClient
from fleet_local.cluster import LocalCluster
from fleet_local.install import checkout, install_chart, local_values, registry_values
from fleet_testing.fleet import Fleet

pytest_plugins = ["fleet_local.pytest_plugin"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-refusals", action="store_true", help="write what the API server says to bad services into e2e/api/refusals.json")


@pytest.fixture(scope="session")
def chart_values(request: pytest.FixtureRequest) -> dict[str, str]:
    """What the chart is installed with."""
    registry = request.config.getoption("--registry")
    return registry_values(registry, request.config.getoption("--tag")) if registry else local_values()


@pytest.fixture(scope="session")
def fleet(cluster: ClusterClient, chart_values: dict[str, str]) -> Iterator[Fleet]:
    """The chart installed on the run's cluster, and its endpoint on loopback."""
    install_chart(cluster, checkout(), chart_values)

    def kubectl(*args: str, input: str | None = None) -> str:
        return cluster.kubectl(*args, stdin=input).stdout

    if isinstance(cluster, LocalCluster):
        yield Fleet(kubectl, cluster.router_url.removesuffix("/v1"))
        return
    with cluster.published(SYSTEM_NAMESPACE, f"svc/{ROUTER_SERVICE_NAME}", ROUTER_SERVICE_PORT) as url:
        yield Fleet(kubectl, url)
