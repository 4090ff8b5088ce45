"""Pure: what to write to the cluster now, from what is there. Also decides when to look again."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from fleet_contract import names
from fleet_operator import drain, rollout
from fleet_operator.api.v1alpha1 import InferenceServiceSpec
from fleet_operator.facts import Key, Obj, Observed, Pod, Workload
from fleet_operator.render.revision import Template, pinned_spec, render_template, revision_of, to_object
from fleet_operator.render.workload import GRACE_BEYOND_DRAIN_S
from fleet_operator.settings import Defaults

HISTORY: Final = 5  # pinned templates kept of revisions that are gone: going back to one brings its image back too


class RevisionCollision(Exception):
    """Two specs of one service have the same revision name."""


@dataclass(frozen=True, slots=True)
class Ref:
    """One object to delete."""

    kind: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class PodMark:
    """The draining annotation of one pod: to set, or with None to remove."""

    name: str
    uid: str
    deadline: str | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do, in this order: `apply`, `pod_marks`, `delete`; then the status, from the rest."""

    target: str
    goal: Mapping[str, int]
    traffic: str | None
    phase: rollout.Phase
    states: tuple[rollout.RevisionState, ...]
    apply: tuple[Obj, ...] = ()
    pod_marks: tuple[PodMark, ...] = ()
    delete: tuple[Ref, ...] = ()
    draining: tuple[str, ...] = ()  # pods that are waited for
    wake_at: datetime | None = None  # the next deadline of a drain
    probe: tuple[tuple[str, str], ...] = field(default=())  # (revision, address of a router that has it)


def plan(observed: Observed, spec: InferenceServiceSpec, defaults: Defaults, now: datetime) -> Plan:
    """The whole next step of one service. Raises RevisionCollision."""
    key = observed.key
    target, template = _target(observed, spec, defaults)
    goal = {role: role_spec.wanted_replicas() for role, role_spec in spec.roles().items()}
    states = tuple(state_of(observed, revision) for revision in sorted({w.revision for w in observed.workloads}))
    told = told_traffic(observed)
    traffic = rollout.choose_traffic(target, goal, states, told)
    steps = rollout.plan_rollout(target, goal, states, told)

    templates = {**observed.templates, target: template}
    keep = {target, *(s.revision for s in states)} - set(steps.remove)
    objects = [_owned(observed, to_object(key.namespace, key.name, template, version=defaults.version))] if target not in observed.templates else []
    for revision in sorted(keep):
        pinned = templates.get(revision)
        if pinned is not None:
            objects += [_owned(observed, pinned.config), _owned(observed, pinned.service)]
    marks: list[PodMark] = []
    waiting: list[str] = []
    wake: list[datetime] = []
    live = {(w.revision, w.role): w for w in observed.workloads}
    for (revision, role), replicas in sorted(steps.replicas.items()):
        workload = live.get((revision, role))
        if revision in steps.remove or (workload is None and revision != target):
            continue
        pinned = templates.get(revision)
        base = pinned.workloads[role] if pinned is not None else _bare(live[revision, role])
        if workload is None:
            objects.append(_workload(observed, base, drain.DrainStep(replicas)))
            continue
        pods = observed.pods_of(revision, role)
        step = drain.step(
            replicas=workload.replicas,
            goal=replicas,
            mark=workload.mark,
            pods=pods,
            routers=observed.routers,
            now=now,
            timeout_s=pinned.drain_s if pinned is not None else _drain_s(base),
        )
        objects.append(_workload(observed, base, step))
        by_uid = {p.uid: p for p in pods}
        marks += [PodMark(by_uid[uid].name, uid, deadline) for uid, deadline in step.pod_marks.items()]
        waiting += step.waiting_for
        wake += [step.wake_at] if step.wake_at is not None else []
    return Plan(
        target=target,
        goal=goal,
        traffic=traffic,
        phase=steps.phase,
        states=states,
        apply=tuple(objects),
        pod_marks=tuple(marks),
        delete=(*_removed(observed, keep), *_old_history(observed, keep)),
        draining=tuple(waiting),
        wake_at=min(wake, default=None),
        probe=_probes(observed, [r for r in {target, traffic} if r is not None]),
    )


def told_traffic(observed: Observed) -> str | None:
    """The revision that the routers have been told to use: the one with the most weight in the status as it stands."""
    traffic = observed.status.get("traffic") or ()
    best = max(traffic, key=lambda t: int(t.get("weight", 0)), default=None)
    return str(best["revision"]) if best is not None and int(best.get("weight", 0)) > 0 else None


def routed_roles(observed: Observed, revision: str) -> frozenset[str]:
    """The roles that a revision consists of."""
    pinned = observed.templates.get(revision)
    return frozenset(pinned.workloads) if pinned is not None else frozenset(w.role for w in observed.workloads if w.revision == revision)


def routing_address(observed: Observed, revision: str) -> str | None:
    """A router that has ready workers of each of the revision's roles."""
    roles = routed_roles(observed, revision)
    return next((r.address for r in observed.routers if r.is_routing(revision, roles)), None)


def _target(observed: Observed, spec: InferenceServiceSpec, defaults: Defaults) -> tuple[str, Template]:
    """The revision that the spec asks for: as it was pinned, or rendered now for the first time."""
    revision = revision_of(spec)
    pinned = observed.templates.get(revision)
    if pinned is None:
        number = max((t.number for t in observed.templates.values()), default=0) + 1
        return revision, render_template(observed.key.namespace, observed.key.name, spec, number, defaults)
    if pinned.spec != pinned_spec(spec):
        raise RevisionCollision(revision)
    return revision, pinned


def state_of(observed: Observed, revision: str) -> rollout.RevisionState:
    """One revision's counts, from the pods themselves."""
    roles = {role: rollout.RoleState(0, 0, 0) for role in routed_roles(observed, revision)}
    hopeless = retiring = False
    for workload in (w for w in observed.workloads if w.revision == revision):
        pods = observed.pods_of(revision, workload.role)
        ready = sum(is_counted_ready(p) for p in pods)
        roles[workload.role] = rollout.RoleState(workload.replicas, len(pods), ready)
        hopeless |= bool(pods) and not ready and all(p.trouble is not None and p.trouble.is_lasting for p in pods)
        retiring |= workload.replicas == 0 or (workload.mark is not None and workload.mark.replicas == 0)
    template, probe = observed.templates.get(revision), observed.probes.get(revision)
    return rollout.RevisionState(
        revision=revision,
        number=template.number if template is not None else 0,
        roles=roles,
        is_routable=probe is not None and probe.is_ok and routing_address(observed, revision) is not None,
        is_hopeless=hopeless,
        is_retiring=retiring,
    )


def is_counted_ready(pod: Pod) -> bool:
    """A pod that can take new requests."""
    return pod.is_ready and not pod.is_terminating and pod.draining is None


def _probes(observed: Observed, revisions: list[str]) -> tuple[tuple[str, str], ...]:
    """A request goes through each revision that matters and that some router has."""
    found = ((revision, routing_address(observed, revision)) for revision in sorted(revisions))
    return tuple((revision, address) for revision, address in found if address is not None)


def owner_reference(key: Key, uid: str) -> dict[str, Any]:
    """Makes an object go with its service; no operator is needed for that."""
    return {
        "apiVersion": f"{names.API_GROUP}/{names.API_VERSION}",
        "kind": names.KIND,
        "name": key.name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _owned(observed: Observed, base: Obj) -> Obj:
    obj = copy.deepcopy(base)
    obj["metadata"]["ownerReferences"] = [owner_reference(observed.key, observed.uid)]
    return obj


def _workload(observed: Observed, base: Obj, step: drain.DrainStep) -> Obj:
    obj = _owned(observed, base)
    obj["spec"]["replicas"] = step.replicas
    if step.mark is not None:
        obj["metadata"]["annotations"] = {names.ANNOTATION_DRAIN: step.mark.to_text()}
    return obj


def _bare(workload: Workload) -> Obj:
    """A StatefulSet whose pinned template was deleted by somebody: what stands is all there is to know of it."""
    meta = workload.obj["metadata"]
    spec = {k: v for k, v in workload.obj["spec"].items() if k != "replicas"}
    kept = {"name": meta["name"], "namespace": meta["namespace"], "labels": meta["labels"]}
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": kept, "spec": spec}


def _drain_s(base: Obj) -> int:
    """Seconds of a drain, when only the StatefulSet is left to know it from."""
    return max(0, int(base["spec"]["template"]["spec"].get("terminationGracePeriodSeconds", 0)) - GRACE_BEYOND_DRAIN_S)


def _removed(observed: Observed, keep: set[str]) -> tuple[Ref, ...]:
    """Everything of the revisions that are gone but their pinned templates, which are the history. StatefulSets first: they are the truth."""
    gone = [
        Ref(kind, name, str(obj["metadata"]["uid"]))
        for (kind, name), obj in observed.live.items()
        if kind != "ControllerRevision" and obj["metadata"]["labels"].get(names.LABEL_REVISION) not in keep
    ]
    return tuple(sorted(gone, key=lambda r: (r.kind != "StatefulSet", r.kind, r.name)))


def _old_history(observed: Observed, keep: set[str]) -> tuple[Ref, ...]:
    """Pinned templates beyond the newest HISTORY of those that are not in use."""
    unused = sorted((t for t in observed.templates.values() if t.revision not in keep), key=lambda t: t.number)
    refs = []
    for template in unused[: max(0, len(unused) - HISTORY)]:
        name = names.revision_object_name(observed.key.name, template.revision)
        refs.append(Ref("ControllerRevision", name, str(observed.live["ControllerRevision", name]["metadata"]["uid"])))
    return tuple(refs)
