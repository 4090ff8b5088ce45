"""Every read of the cluster and of the routers: one service's `Observed`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from fleet_contract import names
from fleet_operator.cluster import (
    CHILD_KINDS,
    CONTROLLER_REVISION,
    EVENT,
    INFERENCE_SERVICE,
    POD,
    STATEFUL_SET,
    Cluster,
)
from fleet_operator.facts import Key, Obj, Observed, ProbeResult, read_pod, read_workload
from fleet_operator.render.revision import Template, from_object
from fleet_operator.routers import Routers, running_routers

ROUTER_LABELS = f"{names.LABEL_NAME}={names.APP_NAME},{names.LABEL_COMPONENT}={names.COMPONENT_ROUTER}"


async def observe(
    cluster: Cluster,
    routers: Routers,
    key: Key,
    *,
    system_namespace: str,
    probes: Callable[[str], Mapping[str, ProbeResult]],
    name_holder: str = "",
) -> Observed | None:
    """The service as it stands; None when there is nothing to do because it is gone or going. Raises ClusterError.

    Args: `probes` gives what is known of requests through the revisions of a service uid; `name_holder` the older service with its name.
    """
    service = await cluster.get(INFERENCE_SERVICE, key.namespace, key.name)
    if service is None or "deletionTimestamp" in service["metadata"]:
        return None
    labels = f"{names.LABEL_SERVICE}={key.name},{names.LABEL_NAME}={names.APP_NAME}"
    listed, pods, router_pods = await asyncio.gather(
        asyncio.gather(*(cluster.list(kind, key.namespace, labels=labels) for kind in CHILD_KINDS)),
        cluster.list(POD, key.namespace, labels=labels),
        cluster.list(POD, system_namespace, labels=ROUTER_LABELS),
    )
    uid = str(service["metadata"]["uid"])
    live: dict[tuple[str, str], Obj] = {}
    leftovers: list[str] = []
    for kind, objects in zip(CHILD_KINDS, listed, strict=True):
        for obj in objects:
            owner = owner_uid(obj)
            if is_ours(obj) and owner in (uid, None):
                live[kind.kind, obj["metadata"]["name"]] = obj
            elif is_ours(obj):
                leftovers.append(f"{kind.kind} {obj['metadata']['name']}")
    workloads = [read_workload(obj) for (kind_name, _), obj in live.items() if kind_name == STATEFUL_SET.kind]
    uids = {w.uid for w in workloads}
    mine = tuple(read_pod(p) for p in pods if owner_uid(p) in uids)
    reports, create_errors = await asyncio.gather(
        routers.reports(key, running_routers(router_pods)),
        _create_errors(cluster, key, [w.name for w in workloads if sum((p.revision, p.role) == (w.revision, w.role) for p in mine) < w.replicas]),
    )
    templates, unreadable = _templates(live)
    return Observed(
        key=key,
        uid=uid,
        generation=int(service["metadata"]["generation"]),
        spec=service.get("spec") or {},
        status=service.get("status") or {},
        created=str(service["metadata"]["creationTimestamp"]),
        templates=templates,
        workloads=tuple(sorted(workloads, key=lambda w: w.name)),
        pods=mine,
        live=live,
        leftovers=tuple(sorted(leftovers)),
        routers=reports,
        probes=dict(probes(uid)),
        create_errors=create_errors,
        name_holder=name_holder,
        unreadable=unreadable,
    )


def owner_uid(obj: Obj) -> str | None:
    """Uid of the controller; None for an orphan."""
    owners = obj["metadata"].get("ownerReferences") or ()
    return next((str(o["uid"]) for o in owners if o.get("controller")), None)


def is_ours(obj: Obj) -> bool:
    """Made by this operator for a service. A StatefulSet's controller gives its ControllerRevisions the pods' labels; those are not ours."""
    labels = obj["metadata"].get("labels") or {}
    owners = obj["metadata"].get("ownerReferences") or ()
    kinds = {o.get("kind") for o in owners if o.get("controller")}
    is_pod_history = obj.get("kind") == CONTROLLER_REVISION.kind and names.LABEL_ROLE in labels
    return labels.get(names.LABEL_MANAGED_BY) == names.MANAGED_BY and kinds <= {names.KIND} and not is_pod_history


def _templates(live: Mapping[tuple[str, str], Obj]) -> tuple[dict[str, Template], tuple[str, ...]]:
    found: dict[str, Template] = {}
    unreadable: list[str] = []
    for (kind, name), obj in live.items():
        if kind == CONTROLLER_REVISION.kind:
            try:
                template = from_object(obj)
                found[template.revision] = template
            except (ValueError, KeyError):
                unreadable.append(name)
    return found, tuple(sorted(unreadable))


async def _create_errors(cluster: Cluster, key: Key, short: Sequence[str]) -> dict[str, str]:
    """Why the StatefulSets that lack pods cannot make them, in the words of their controller's events."""
    if not short:
        return {}
    events = await cluster.list(EVENT, key.namespace, fields="involvedObject.kind=StatefulSet,reason=FailedCreate")
    latest: dict[str, tuple[str, str]] = {}
    for event in events:
        name, at = event["involvedObject"].get("name", ""), str(event.get("lastTimestamp") or event.get("eventTime") or "")
        if name in short and at >= latest.get(name, ("", ""))[0]:
            latest[name] = (at, str(event.get("message", "")))
    return {name: text for name, (_, text) in latest.items()}
