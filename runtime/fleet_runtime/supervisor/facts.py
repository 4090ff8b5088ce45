"""What the machine allows and what the pod says: identity, drain deadline. Pure functions of facts, and who reads them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from fleet_contract import names
from fleet_runtime.config import Identity

# For tests and for pods that mount it elsewhere.
ENV_PODINFO_ANNOTATIONS: Final = "RADIXFLEET_PODINFO_ANNOTATIONS"

PASSED_DEADLINE_S: Final = 1.0  # a drain whose deadline is over still gets this long to say goodbye


def identity_from_env(env: Mapping[str, str]) -> Identity:
    """Who this worker is; outside a pod a new UUID."""
    return Identity(
        pod_uid=env.get(names.ENV_POD_UID) or str(uuid.uuid4()),
        pod_name=env.get(names.ENV_POD_NAME, ""),
        namespace=env.get(names.ENV_NAMESPACE, ""),
        service=env.get(names.ENV_SERVICE, ""),
        pod_ip=env.get(names.ENV_POD_IP, ""),
    )


def annotation(podinfo: str, key: str) -> str | None:
    """One annotation out of a downward-API file: a line per annotation, `key="value"`, the value quoted with escapes."""
    for line in podinfo.splitlines():
        name, eq, quoted = line.partition("=")
        if name == key and eq:
            try:
                value = json.loads(quoted)
            except ValueError:
                value = quoted.strip('"')
            return value if isinstance(value, str) else quoted
    return None


def drain_seconds(podinfo: str | None, drain_timeout_s: float, now: datetime) -> float:
    """How long running requests may go on after SIGTERM: the flag, or less when the pod's drain has an earlier deadline already.

    A deadline that cannot be read counts as none.
    """
    text = annotation(podinfo or "", names.ANNOTATION_DRAINING)
    if text is None:
        return drain_timeout_s
    try:
        deadline = datetime.fromisoformat(text)
    except ValueError:
        return drain_timeout_s
    if deadline.tzinfo is None:
        deadline = deadline.replace(tzinfo=UTC)
    left = (deadline - now).total_seconds()
    return min(drain_timeout_s, max(left, PASSED_DEADLINE_S))
