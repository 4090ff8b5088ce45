"""An API server in memory with the controllers that the operator relies on: StatefulSets make and remove pods, owners take children along.

Time stands still unless a test moves it. `crash_before_write` and `fail_write` break one chosen write. It is naive on purpose: a write is a
deep merge, one field manager is remembered by the leaves that it applied last.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from fleet_contract import names
from fleet_operator.cluster import BY_KIND, EVENT, INFERENCE_SERVICE, POD, STATEFUL_SET, Kind
from fleet_operator.errors import ClusterError
from fleet_operator.facts import Key, Obj, ProbeResult, RouterReport, WorkerReport, rfc3339

Slot = tuple[str, str, str]  # kind, namespace, name


class Crash(BaseException):
    """The operator died right here."""


class FakeCluster:
    """The store and its controllers."""

    def __init__(self) -> None:
        self.objects: dict[Slot, Obj] = {}
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.writes: list[str] = []  # what the operator wrote
        self.events: list[Obj] = []
        self.crash_before_write: int | None = None
        self.fail_write: Callable[[str], ClusterError | None] = lambda what: None
        self.fail_read: Callable[[Kind], ClusterError | None] = lambda kind: None
        self.broken_images: set[str] = set()
        self.slow_pods: set[str] = set()  # names that never become ready
        self._applied: dict[Slot, Obj] = {}
        self._count = 0

    # What the operator calls.

    async def get(self, kind: Kind, namespace: str, name: str) -> Obj | None:
        self._read(kind)
        return copy.deepcopy(self.objects.get((kind.kind, namespace, name)))

    async def list(self, kind: Kind, namespace: str | None, *, labels: str = "", fields: str = "") -> list[Obj]:
        self._read(kind)
        if kind is EVENT:
            return copy.deepcopy(self.events)
        wanted = dict(pair.split("=") for pair in labels.split(",") if pair)
        return [
            copy.deepcopy(obj)
            for (found, where, _), obj in sorted(self.objects.items())
            if found == kind.kind and namespace in (None, where) and wanted.items() <= (obj["metadata"].get("labels") or {}).items()
        ]

    async def apply(self, kind: Kind, obj: Obj, *, subresource: str = "") -> Obj:
        slot = self._slot(kind, obj)
        self._write(f"apply {kind.kind} {obj['metadata']['name']} {subresource}".strip())
        live = self.objects.get(slot)
        self._precondition(obj["metadata"].get("uid"), live)
        if live is None:
            if subresource:
                raise ClusterError(404, "NotFound", f"{kind.kind} {slot[2]} not found")
            live = self._new(slot)
        wanted = {"status": obj["status"]} if subresource else {k: v for k, v in obj.items() if k != "status"}
        remembered = (*slot[:2], slot[2] + "/" + subresource)
        merged = _merge(_without(live, self._applied.get(remembered, {})), wanted)
        self._applied[remembered] = copy.deepcopy(wanted)
        self._store(slot, merged, is_spec=not subresource)
        return copy.deepcopy(self.objects[slot])

    async def annotate(self, kind: Kind, namespace: str, name: str, uid: str, annotations: Mapping[str, str | None]) -> None:
        self._write(f"annotate {kind.kind} {name}")
        slot = (kind.kind, namespace, name)
        live = self.objects.get(slot)
        if live is None:
            raise ClusterError(404, "NotFound", f"{kind.kind} {name} not found")
        self._precondition(uid, live)
        changed = copy.deepcopy(live)
        found = changed["metadata"].setdefault("annotations", {})
        for key, value in annotations.items():
            found.pop(key, None)
            if value is not None:
                found[key] = value
        self._store(slot, changed, is_spec=False)

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        self._write(f"delete {kind.kind} {name}")
        live = self.objects.get((kind.kind, namespace, name))
        if live is not None:
            self._precondition(uid, live)
            self.remove(kind, namespace, name)

    async def record(self, event: Obj) -> None:
        self.writes.append("event")
        self.events.append(event)

    async def create(self, kind: Kind, obj: Obj) -> Obj:
        slot = self._slot(kind, obj)
        if slot in self.objects:
            raise ClusterError(409, "AlreadyExists", "taken")
        self._store(slot, _merge(self._new(slot), obj), is_spec=True)
        return copy.deepcopy(self.objects[slot])

    async def replace(self, kind: Kind, obj: Obj) -> Obj:
        slot = self._slot(kind, obj)
        live = self.objects.get(slot)
        if live is None or live["metadata"]["resourceVersion"] != obj["metadata"]["resourceVersion"]:
            raise ClusterError(409, "Conflict", "changed meanwhile")
        self._store(slot, copy.deepcopy(obj), is_spec=True)
        return copy.deepcopy(self.objects[slot])

    # What a test does.

    def put_service(self, name: str, spec: Obj, namespace: str = "demo") -> Obj:
        """`kubectl apply` of an InferenceService by a user."""
        slot = (INFERENCE_SERVICE.kind, namespace, name)
        live = copy.deepcopy(self.objects.get(slot)) or self._new(slot)
        live["spec"] = copy.deepcopy(spec)
        self._store(slot, live, is_spec=True)
        return self.objects[slot]

    def put(self, kind: Kind, obj: Obj) -> Obj:
        """Somebody else makes an object."""
        slot = self._slot(kind, obj)
        self._store(slot, _merge(self._new(slot), obj), is_spec=True)
        return self.objects[slot]

    def remove(self, kind: Kind, namespace: str, name: str, *, orphan: bool = False) -> None:
        """Deletes an object; what it owns goes too, or with `orphan` loses its owner."""
        gone = self.objects.pop((kind.kind, namespace, name))
        for key in [k for k in self._applied if k[0] == kind.kind and k[2].split("/")[0] == name]:
            del self._applied[key]
        uid = gone["metadata"]["uid"]
        for slot, obj in list(self.objects.items()):
            owners = obj["metadata"].get("ownerReferences") or []
            if any(o["uid"] == uid for o in owners):
                if orphan:
                    obj["metadata"]["ownerReferences"] = [o for o in owners if o["uid"] != uid]
                elif slot in self.objects:
                    self.remove(BY_KIND[slot[0]], slot[1], slot[2])

    def of_kind(self, kind: Kind) -> list[Obj]:
        """All objects of a kind, by name."""
        return [obj for (found, _, _), obj in sorted(self.objects.items()) if found == kind.kind]

    def service(self, name: str, namespace: str = "demo") -> Obj:
        """One InferenceService."""
        return self.objects[INFERENCE_SERVICE.kind, namespace, name]

    def condition(self, name: str, kind: str, namespace: str = "demo") -> Obj:
        """One condition of a service; {} while there is none."""
        found = (self.service(name, namespace).get("status") or {}).get("conditions") or ()
        return next((c for c in found if c["type"] == kind), {})

    def pass_time(self, seconds: float) -> None:
        """Moves the clock."""
        self.now += timedelta(seconds=seconds)

    def run_controllers(self) -> None:
        """StatefulSets make the pods that they lack, remove those beyond their replicas, and the kubelet makes pods ready."""
        for sts in self.of_kind(STATEFUL_SET):
            meta, spec = sts["metadata"], sts["spec"]
            wanted = {f"{meta['name']}-{i}" for i in range(spec["replicas"])}
            for slot, pod in list(self.objects.items()):
                owner = (pod["metadata"].get("ownerReferences") or [{}])[0].get("uid")
                if slot[0] == POD.kind and owner == meta["uid"] and slot[2] not in wanted:
                    del self.objects[slot]
            for name in sorted(wanted):
                if (POD.kind, meta["namespace"], name) not in self.objects:
                    self._make_pod(sts, name)
        for pod in self.of_kind(POD):
            self._kubelet(pod)

    def _make_pod(self, sts: Obj, name: str) -> None:
        template = sts["spec"]["template"]
        owner = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": sts["metadata"]["name"], "uid": sts["metadata"]["uid"], "controller": True}
        slot = (POD.kind, sts["metadata"]["namespace"], name)
        pod = self._new(slot)
        pod["metadata"] |= {"labels": dict(template["metadata"]["labels"]), "ownerReferences": [owner]}
        pod["spec"] = copy.deepcopy(template["spec"])
        pod["status"] = {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "True"}]}
        self._store(slot, pod, is_spec=True)

    def _kubelet(self, pod: Obj) -> None:
        image = pod["spec"]["containers"][0]["image"]
        ready = image not in self.broken_images and pod["metadata"]["name"] not in self.slow_pods
        container: Obj = {"name": "runtime", "image": image, "state": {"running": {}}}
        if image in self.broken_images:
            container["state"] = {"waiting": {"reason": "ImagePullBackOff"}}
        pod["status"] = {
            "phase": "Running" if ready else "Pending",
            "podIP": "10.0.0.1",
            "conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True" if ready else "False"}],
            "containerStatuses": [container],
        }

    # The store.

    def _read(self, kind: Kind) -> None:
        if (error := self.fail_read(kind)) is not None:
            raise error

    def _write(self, what: str) -> None:
        if self.crash_before_write is not None:
            if self.crash_before_write == 0:
                self.crash_before_write = None
                raise Crash
            self.crash_before_write -= 1
        if (error := self.fail_write(what)) is not None:
            raise error
        self.writes.append(what)

    def _precondition(self, uid: str | None, live: Obj | None) -> None:
        if uid is not None and (live is None or live["metadata"]["uid"] != uid):
            raise ClusterError(409, "Conflict", "the uid in the precondition is not the object's")

    def _slot(self, kind: Kind, obj: Obj) -> Slot:
        return (kind.kind, obj["metadata"]["namespace"], obj["metadata"]["name"])

    def _new(self, slot: Slot) -> Obj:
        self._count += 1
        meta = {
            "name": slot[2],
            "namespace": slot[1],
            "uid": f"uid-{self._count}",
            "resourceVersion": "0",
            "generation": 0,
            "creationTimestamp": rfc3339(self.now),
        }
        kind = BY_KIND.get(slot[0])
        return {"apiVersion": kind.api_version if kind else "coordination.k8s.io/v1", "kind": slot[0], "metadata": meta}

    def _store(self, slot: Slot, obj: Obj, *, is_spec: bool) -> None:
        if self.objects.get(slot) == obj:
            return
        self._count += 1
        obj["metadata"]["resourceVersion"] = str(self._count)
        if is_spec:
            obj["metadata"]["generation"] = obj["metadata"].get("generation", 0) + 1
        self.objects[slot] = obj


def _merge(live: Any, wanted: Any) -> Any:
    if isinstance(live, dict) and isinstance(wanted, dict):
        return {**live, **{k: _merge(live.get(k), v) for k, v in wanted.items()}}
    return copy.deepcopy(wanted)


def _without(live: Any, applied: Any) -> Any:
    """What is left of an object when the leaves that we applied last time are taken out."""
    if not isinstance(live, dict) or not isinstance(applied, dict):
        return live
    left = {k: v for k, v in live.items() if k not in applied}
    for key in applied.keys() & live.keys():
        if isinstance(live[key], dict) and isinstance(applied[key], dict) and (rest := _without(live[key], applied[key])):
            left[key] = rest
    return left


class FakeRouters:
    """Routers that see the pods of a FakeCluster at once. `busy` are pod names with a request, `frozen` are router pods that do not answer."""

    def __init__(self, cluster: FakeCluster, count: int = 1) -> None:
        self.cluster = cluster
        self.busy: set[str] = set()
        self.frozen: set[str] = set()
        self.unsynced: set[str] = set()
        self.probe_error = ""
        self.probes: list[str] = []
        for i in range(count):
            labels = {names.LABEL_NAME: names.APP_NAME, names.LABEL_COMPONENT: names.COMPONENT_ROUTER}
            meta = {"name": f"router-{i}", "namespace": names.SYSTEM_NAMESPACE, "labels": labels}
            pod = cluster.put(POD, {"metadata": meta, "spec": {"containers": [{"image": "router"}]}})
            pod["status"] = {"phase": "Running", "podIP": "10.0.9.1"}

    async def reports(self, key: Key, pods: list[Obj]) -> tuple[RouterReport, ...]:
        """What each router says."""
        return tuple(self._report(key, pod["metadata"]["name"]) for pod in pods)

    def _report(self, key: Key, name: str) -> RouterReport:
        if name in self.frozen:
            return RouterReport(name, name, error="no answer within 1 s")
        workers: dict[str, dict[str, WorkerReport]] = {}
        for pod in self.cluster.of_kind(POD):
            meta = pod["metadata"]
            labels = meta.get("labels") or {}
            if labels.get(names.LABEL_SERVICE) != key.name or meta["namespace"] != key.namespace:
                continue
            draining = (meta.get("annotations") or {}).get(names.ANNOTATION_DRAINING)
            ready = any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions") or ())
            state = "draining" if draining else "ready" if ready else "starting"
            report = WorkerReport(meta["uid"], labels[names.LABEL_ROLE], state, int(meta["name"] in self.busy), draining)
            workers.setdefault(labels[names.LABEL_REVISION], {})[meta["uid"]] = report
        return RouterReport(name, name, name not in self.unsynced, workers)

    async def probe(self, key: Key, address: str, revision: str) -> ProbeResult:
        """One request through a revision."""
        self.probes.append(revision)
        return ProbeResult(not self.probe_error, self.probe_error)
