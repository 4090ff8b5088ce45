"""The labels of contract section 2: which of them select pods, and which only describe."""

from __future__ import annotations

from fleet_contract import names

GROUP: str = "0"


def service_labels(service: str, *, version: str) -> dict[str, str]:
    """Labels of every object of a service."""
    return {
        names.LABEL_NAME: names.APP_NAME,
        names.LABEL_COMPONENT: names.COMPONENT_WORKER,
        names.LABEL_MANAGED_BY: names.MANAGED_BY,
        names.LABEL_VERSION: version,
        names.LABEL_SERVICE: service,
    }


def revision_labels(service: str, revision: str, *, version: str) -> dict[str, str]:
    """Labels of what a revision has once."""
    return {**service_labels(service, version=version), names.LABEL_REVISION: revision}


def worker_selector(service: str, revision: str, role: str) -> dict[str, str]:
    """What a StatefulSet selects its pods by; it can never change later."""
    return {
        names.LABEL_SERVICE: service,
        names.LABEL_ROLE: role,
        names.LABEL_REVISION: revision,
        names.LABEL_GROUP: GROUP,
    }


def worker_labels(service: str, revision: str, role: str, *, version: str) -> dict[str, str]:
    """Labels of a StatefulSet and of its pods."""
    return {**service_labels(service, version=version), **worker_selector(service, revision, role)}
