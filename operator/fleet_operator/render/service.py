"""The headless Service of a revision: gives its pods stable names, also before they are ready."""

from __future__ import annotations

from typing import Any

from fleet_contract import names
from fleet_operator.render.labels import revision_labels


def render_service(namespace: str, service: str, revision: str, *, version: str) -> dict[str, Any]:
    """No virtual address and no balancing: workers are found by the router, not through this Service."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": names.revision_object_name(service, revision),
            "namespace": namespace,
            "labels": revision_labels(service, revision, version=version),
        },
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {names.LABEL_SERVICE: service, names.LABEL_REVISION: revision},
            "ports": [
                {"name": "data", "port": names.RUNTIME_DATA_PORT, "protocol": "TCP", "targetPort": "data"},
                {"name": "internal", "port": names.RUNTIME_INTERNAL_PORT, "protocol": "TCP", "targetPort": "internal"},
            ],
        },
    }
