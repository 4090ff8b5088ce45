"""What the operator knows of one service at one moment: plain data that `observe` gathers and all deciding code reads.

Kubernetes objects stay dicts where they are only compared or passed on; whatever is decided upon is a field here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from fleet_contract import names
from fleet_operator.render.revision import Template

Obj = dict[str, Any]


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """One service; what the work queue holds."""

    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a pod is not ready. `is_lasting`: it will not end without somebody's doing."""

    reason: str
    message: str
    is_lasting: bool = False


@dataclass(frozen=True, slots=True)
class Pod:
    """One worker pod of a StatefulSet of ours."""

    name: str
    uid: str
    ordinal: int
    revision: str
    role: str
    is_ready: bool = False
    is_terminating: bool = False
    is_scheduled: bool = True
    draining: str | None = None  # the annotation, as it stands
    trouble: Trouble | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """Intent of a drain, as it stands on a StatefulSet: shrink to `replicas`, at the latest at `deadline`."""

    replicas: int
    deadline: datetime

    def to_text(self) -> str:
        """The annotation's value."""
        return json.dumps({"replicas": self.replicas, "deadline": rfc3339(self.deadline)})

    @classmethod
    def from_text(cls, text: str | None) -> Mark | None:
        """Reads the annotation; something unreadable counts as none, so that it is written anew."""
        try:
            data = json.loads(text or "null")
            return cls(int(data["replicas"]), parse_time(data["deadline"]))
        except (ValueError, TypeError, KeyError):
            return None


@dataclass(frozen=True, slots=True)
class Workload:
    """One StatefulSet of ours."""

    name: str
    uid: str
    revision: str
    role: str
    replicas: int
    mark: Mark | None
    is_terminating: bool
    obj: Obj = field(repr=False)


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What one router says of one worker."""

    pod_uid: str
    role: str
    state: str
    inflight: int
    drain_deadline: str | None


@dataclass(frozen=True, slots=True)
class RouterReport:
    """What one router pod says of the service; `error` when it did not answer in time."""

    pod: str
    address: str
    is_synced: bool = False
    workers: Mapping[str, Mapping[str, WorkerReport]] = field(default_factory=dict)  # revision → pod uid → worker
    error: str = ""

    def worker(self, pod_uid: str) -> WorkerReport | None:
        """The worker of a pod, whatever its revision."""
        for workers in self.workers.values():
            if pod_uid in workers:
                return workers[pod_uid]
        return None

    def is_routing(self, revision: str, roles: frozenset[str]) -> bool:
        """True when this router has a ready worker of each role of the revision."""
        ready = {w.role for w in self.workers.get(revision, {}).values() if w.state == "ready"}
        return not self.error and self.is_synced and bool(roles) and roles <= ready


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Outcome of the synthetic request through a revision; None as a whole while it runs."""

    is_ok: bool
    error: str = ""


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything about one service."""

    key: Key
    uid: str
    generation: int
    spec: Obj
    status: Obj
    created: str
    templates: Mapping[str, Template]
    workloads: tuple[Workload, ...]
    pods: tuple[Pod, ...]
    live: Mapping[tuple[str, str], Obj]  # (kind, name) → our objects as they stand
    leftovers: tuple[str, ...] = ()  # objects of a deleted service of the same name that are still there
    routers: tuple[RouterReport, ...] = ()
    probes: Mapping[str, ProbeResult] = field(default_factory=dict)  # by revision
    create_errors: Mapping[str, str] = field(default_factory=dict)  # workload name → why its pods cannot be made
    name_holder: str = ""  # the older service that holds our served name, as <namespace>/<name>
    unreadable: tuple[str, ...] = ()  # pinned revisions that this operator cannot read

    def pods_of(self, revision: str, role: str) -> list[Pod]:
        """Pods of one StatefulSet, lowest ordinal first."""
        return sorted((p for p in self.pods if p.revision == revision and p.role == role), key=lambda p: p.ordinal)


def rfc3339(moment: datetime) -> str:
    """UTC with whole seconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str) -> datetime:
    """Reads RFC 3339. Raises ValueError for anything else, also for a time without zone."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    return moment


def same_moment(a: str | None, b: str | None) -> bool:
    """True when both are the same moment, however it is spelled."""
    if a is None or b is None:
        return a == b
    try:
        return parse_time(a) == parse_time(b)
    except ValueError:
        return False


def is_ready(pod: Obj) -> bool:
    """The pod's Ready condition."""
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in (pod.get("status") or {}).get("conditions") or ())


def read_pod(obj: Obj) -> Pod:
    """A pod of one of our StatefulSets."""
    meta = obj["metadata"]
    conditions = {c.get("type"): c for c in (obj.get("status") or {}).get("conditions") or ()}
    return Pod(
        name=meta["name"],
        uid=meta["uid"],
        ordinal=int(meta["name"].rpartition("-")[2]),
        revision=meta["labels"][names.LABEL_REVISION],
        role=meta["labels"][names.LABEL_ROLE],
        is_ready=is_ready(obj),
        is_terminating="deletionTimestamp" in meta,
        is_scheduled=(conditions.get("PodScheduled") or {}).get("status") == "True",
        draining=(meta.get("annotations") or {}).get(names.ANNOTATION_DRAINING),
        trouble=None if is_ready(obj) else find_trouble(obj),
    )


def read_workload(obj: Obj) -> Workload:
    """A StatefulSet of ours."""
    meta = obj["metadata"]
    return Workload(
        name=meta["name"],
        uid=meta["uid"],
        revision=meta["labels"][names.LABEL_REVISION],
        role=meta["labels"][names.LABEL_ROLE],
        replicas=int((obj.get("spec") or {}).get("replicas", 1)),
        mark=Mark.from_text((meta.get("annotations") or {}).get(names.ANNOTATION_DRAIN)),
        is_terminating="deletionTimestamp" in meta,
        obj=obj,
    )


_IMAGE = frozenset({"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError", "RegistryUnavailable"})
_NEXT_STEP = {
    "ModelNotFound": "check model.uri, and podTemplate.volumes for a file:// model",
    "ModelInvalid": "check the files of the model",
    "OutOfMemory": "raise resources.limits.memory or lower engine.kvCache.memory or engine.contextLength",
    "BadFlag": "check engine.args",
    "PortInUse": "the pod's ports are taken; check for a sidecar that listens on them",
    "CacheUnwritable": "check the volumes of podTemplate.volumeMounts",
}


def find_trouble(pod: Obj) -> Trouble | None:
    """Why a pod that is not ready is not: the scheduler's, the kubelet's or the runtime's own words, with the next step."""
    name, status = pod["metadata"]["name"], pod.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            text = condition.get("message", "").rstrip(". ")
            return Trouble("Unschedulable", f"pod {name} finds no node: {text}; add capacity or change resources, nodeSelector or tolerations", True)
    for container in status.get("containerStatuses") or ():
        if trouble := _container_trouble(name, container):
            return trouble
    if status.get("phase") == "Failed":
        return Trouble("PodFailed", f"pod {name} failed: {status.get('reason', '')} {status.get('message', '')}".strip(), True)
    return None


def _container_trouble(pod: str, container: Obj) -> Trouble | None:
    state, last = container.get("state") or {}, (container.get("lastState") or {}).get("terminated")
    waiting = state.get("waiting") or {}
    reason = waiting.get("reason", "")
    if reason in _IMAGE:
        return Trouble(
            "ImagePullFailed", f"pod {pod} cannot get image {container.get('image')}: {reason}; check the image and imagePullSecrets", True
        )
    if reason in ("CreateContainerConfigError", "CreateContainerError", "RunContainerError"):
        return Trouble("ContainerCannotStart", f"pod {pod} cannot start its container: {waiting.get('message', reason)}", True)
    ended = state.get("terminated") or last
    if ended is None:
        return None
    return _end_trouble(pod, ended, is_lasting=reason == "CrashLoopBackOff")


def _end_trouble(pod: str, ended: Obj, *, is_lasting: bool) -> Trouble | None:
    """From how the container's last run ended; a clean end is no trouble."""
    text = (ended.get("message") or "").strip()
    try:
        said = json.loads(text)
        reason, message = str(said["reason"]), str(said["message"])
    except (ValueError, TypeError, KeyError):
        reason, message = "", text.rpartition("\n")[2][-400:]  # of a log, the last line is the cause
    if ended.get("reason") == "OOMKilled":
        reason, message = "OutOfMemory", "the kernel ended it for using more memory than its limit"
    if not reason and ended.get("exitCode") == 0 and not is_lasting:
        return None
    if reason in names.START_FAILURES:
        step = _NEXT_STEP.get(reason, f"see kubectl logs --previous {pod}")
        return Trouble(reason, f"pod {pod} did not start: {message}; {step}", is_lasting)
    detail = f": {message}" if message else ""
    return Trouble("CrashLoop", f"pod {pod} ended with exit code {ended.get('exitCode')}{detail}; see kubectl logs --previous {pod}", is_lasting)
