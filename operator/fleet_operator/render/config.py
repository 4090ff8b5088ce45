"""The ConfigMap of a revision: the environment that all its workers share, read by the pods through envFrom."""

from __future__ import annotations

from typing import Any

from fleet_contract import names
from fleet_operator.render.labels import revision_labels


def render_config(namespace: str, service: str, revision: str, *, version: str) -> dict[str, Any]:
    """Immutable, as a revision never changes. HOME and TMPDIR point at the one writable folder."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": names.revision_object_name(service, revision),
            "namespace": namespace,
            "labels": revision_labels(service, revision, version=version),
        },
        "immutable": True,
        "data": {
            names.ENV_SERVICE: service,
            "HOME": names.SCRATCH_DIR,
            "TMPDIR": names.SCRATCH_DIR,
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
    }
