"""The revision's name, and the ControllerRevision that pins what was rendered for it.

A revision is rendered once, by the operator that first meets it. Later operators read the pinned templates, so that neither a new
default nor a new image of the chart ever changes a live revision.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final

from fleet_contract import names
from fleet_operator.api import quantity
from fleet_operator.api.v1alpha1 import InferenceServiceSpec
from fleet_operator.render.config import render_config
from fleet_operator.render.labels import revision_labels
from fleet_operator.render.service import render_service
from fleet_operator.render.workload import drain_timeout_s, render_workload
from fleet_operator.settings import Defaults

SCHEMA: Final = 1
_QUANTITIES: Final = frozenset({("kvCache", "memory"), ("emptyDir", "sizeLimit")})


def pinned_spec(spec: InferenceServiceSpec) -> dict[str, Any]:
    """The user-set fields that reach pods: everything but replicas. Empty means absent; quantities have one spelling."""
    data = spec.model_dump(by_alias=True, exclude_none=True)
    for role in names.ROLES:
        if role in data:
            data[role].pop("replicas", None)
    cleaned = {key: _clean(value, "", key) for key, value in data.items()}
    # A role that is set but empty still decides which pods there are.
    return {key: value for key, value in cleaned.items() if value not in ({}, []) or key in names.ROLES}


def _clean(value: Any, parent: str = "", key: str = "") -> Any:
    """Drops empty maps and lists; writes quantities canonically where the schema has quantities, and nowhere else."""
    if isinstance(value, dict):
        if parent == "resources":
            return {k: quantity.canonical(v) for k, v in value.items()}
        cleaned = ((k, _clean(v, key, k)) for k, v in value.items())
        return {k: v for k, v in cleaned if v not in ({}, [])}
    if isinstance(value, list):
        return [_clean(item, parent, key) for item in value]
    if (parent, key) in _QUANTITIES:
        return quantity.canonical(value)
    return value


def revision_of(spec: InferenceServiceSpec) -> str:
    """Name of the revision that a spec asks for: 8 hex digits."""
    text = json.dumps(pinned_spec(spec), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True)
class Template:
    """One revision as it was pinned: complete objects but for replicas and owner references."""

    revision: str
    number: int  # order of creation
    spec: dict[str, Any]  # pinned_spec
    drain_s: int
    workloads: dict[str, dict[str, Any]]  # by role
    service: dict[str, Any]
    config: dict[str, Any]


def render_template(namespace: str, service: str, spec: InferenceServiceSpec, number: int, defaults: Defaults) -> Template:
    """Renders a revision that was never seen before. Raises as `runtime_launch` does."""
    revision = revision_of(spec)
    return Template(
        revision=revision,
        number=number,
        spec=pinned_spec(spec),
        drain_s=drain_timeout_s(spec),
        workloads={role: render_workload(namespace, service, spec, revision, role, defaults) for role in spec.roles()},
        service=render_service(namespace, service, revision, version=defaults.version),
        config=render_config(namespace, service, revision, version=defaults.version),
    )


def to_object(namespace: str, service: str, template: Template, *, version: str) -> dict[str, Any]:
    """The ControllerRevision that holds a template."""
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": {
            "name": names.revision_object_name(service, template.revision),
            "namespace": namespace,
            "labels": revision_labels(service, template.revision, version=version),
        },
        "revision": template.number,
        "data": {
            "schema": SCHEMA,
            "spec": template.spec,
            "drainSeconds": template.drain_s,
            "workloads": template.workloads,
            "service": template.service,
            "config": template.config,
        },
    }


def from_object(obj: dict[str, Any]) -> Template:
    """Reads a ControllerRevision of ours. Raises ValueError when its data is not a template that this operator can read."""
    data = obj.get("data") or {}
    if data.get("schema") != SCHEMA:
        name = obj["metadata"]["name"]
        raise ValueError(f"ControllerRevision {name} has schema {data.get('schema')!r}, this operator reads {SCHEMA}; run the operator that wrote it")
    return Template(
        revision=obj["metadata"]["labels"][names.LABEL_REVISION],
        number=int(obj["revision"]),
        spec=data["spec"],
        drain_s=int(data["drainSeconds"]),
        workloads=data["workloads"],
        service=data["service"],
        config=data["config"],
    )
