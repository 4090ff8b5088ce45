"""Discovery from the API server: lists and watches InferenceServices, worker and router pods, and hands whole snapshots on.

Runs in the control process. Objects → facts is pure; the API server stands behind the Protocol `Source`. While it is away the last
snapshot stays. Sources: Kubernetes API concepts, "Efficient detection of changes" (list, watch, 410 Gone, bookmarks).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, Protocol

from fleet_contract import names
from fleet_router.observed import Observed, PodFacts, RouterFacts, ServiceFacts

log = logging.getLogger(__name__)

Json = Mapping[str, Any]
SERVICES: Final = "services"
PODS: Final = "pods"
RETRY_S: Final = (0.2, 0.5, 1.0, 2.0, 5.0)
WATCH_S: Final = 240  # the API server ends a watch after so long


class Gone(Exception):
    """The resource version is too old (410): list again."""


class SourceError(Exception):
    """The API server refused or could not be reached; the message says why."""


class Source(Protocol):
    """One connection to an API server."""

    async def list(self, kind: str) -> tuple[list[Json], str]:
        """All objects of a kind and the resource version of the list. Raises SourceError."""
        ...

    def watch(self, kind: str, resource_version: str) -> AsyncIterator[tuple[str, Json]]:
        """Events after a version: ADDED, MODIFIED, DELETED, BOOKMARK. Ends by itself. Raises Gone, SourceError."""
        ...

    async def close(self) -> None: ...


def service_facts(o: Json) -> ServiceFacts:
    """One InferenceService as facts; fields that are missing or odd get their default."""
    meta, spec, status = _object(o, "metadata"), _object(o, "spec"), _object(o, "status")
    name = str(meta.get("name", ""))
    traffic = status.get("traffic")
    shares: list[tuple[str, int]] = []
    for t in traffic if isinstance(traffic, list) else []:
        if isinstance(t, Mapping) and isinstance(t.get("revision"), str) and isinstance(t.get("weight"), int) and t["weight"] >= 0:
            shares.append((t["revision"], t["weight"]))
    return ServiceFacts(
        namespace=str(meta.get("namespace", "")),
        name=name,
        uid=str(meta.get("uid", "")),
        created=str(meta.get("creationTimestamp", "")),
        generation=int(meta.get("generation") or 0),
        model_name=str(_object(spec, "model").get("name") or name),
        traffic=shares,
        is_off=_is_off(spec),
    )


def _is_off(spec: Json) -> bool:
    """True when every role that the spec has is set to 0 replicas; one that is not set is 1."""
    roles = [_object(spec, role) for role in names.ROLES if isinstance(spec.get(role), Mapping)]
    return bool(roles) and all(role.get("replicas") == 0 for role in roles)


def pod_facts(o: Json) -> PodFacts | None:
    """One worker pod as facts; None for a pod without our labels."""
    meta, status = _object(o, "metadata"), _object(o, "status")
    labels = _object(meta, "labels")
    if labels.get(names.LABEL_COMPONENT) != names.COMPONENT_WORKER or not labels.get(names.LABEL_SERVICE):
        return None
    conditions = status.get("conditions")
    ready = any(isinstance(c, Mapping) and c.get("type") == "Ready" and c.get("status") == "True" for c in conditions or [])
    deadline = _object(meta, "annotations").get(names.ANNOTATION_DRAINING)
    return PodFacts(
        uid=str(meta.get("uid", "")),
        name=str(meta.get("name", "")),
        namespace=str(meta.get("namespace", "")),
        service=str(labels[names.LABEL_SERVICE]),
        role=str(labels.get(names.LABEL_ROLE, "")),
        revision=str(labels.get(names.LABEL_REVISION, "")),
        ip=str(status.get("podIP") or ""),
        ready=ready,
        deleting=meta.get("deletionTimestamp") is not None,
        terminal=status.get("phase") in ("Succeeded", "Failed"),
        drain_deadline=str(deadline) if deadline is not None else None,
    )


def router_facts(o: Json) -> RouterFacts | None:
    """One router pod as facts; None for another pod. All routers of the cluster serve the same workers, whatever their namespace."""
    meta, status = _object(o, "metadata"), _object(o, "status")
    labels = _object(meta, "labels")
    if labels.get(names.LABEL_COMPONENT) != names.COMPONENT_ROUTER or labels.get(names.LABEL_NAME) != names.APP_NAME:
        return None
    terminal = status.get("phase") in ("Succeeded", "Failed")
    return RouterFacts(uid=str(meta.get("uid", "")), ip=str(status.get("podIP") or ""), terminal=terminal)


def observe(services: Mapping[str, Json], pods: Mapping[str, Json]) -> Observed:
    """The snapshot of both stores, in a fixed order."""
    found = sorted((service_facts(o) for o in services.values()), key=lambda s: s.key)
    workers = [p for p in map(pod_facts, pods.values()) if p is not None]
    routers = [r for r in map(router_facts, pods.values()) if r is not None]
    return Observed(found, sorted(workers, key=lambda p: (p.namespace, p.name, p.uid)), sorted(routers, key=lambda r: r.uid))


class Discovery:
    """Keeps both stores fresh; `publish` gets a snapshot when something of it changed and both kinds were listed once."""

    def __init__(self, connect: Callable[[], Awaitable[Source]], publish: Callable[[Observed], None], relist_s: float) -> None:
        self._connect = connect
        self._publish = publish
        self._relist_s = relist_s
        self._stores: dict[str, dict[str, Json]] = {}
        self._last: Observed | None = None

    async def run(self) -> None:
        """Ends by cancellation only."""
        async with asyncio.TaskGroup() as group:
            for kind in (SERVICES, PODS):
                group.create_task(self._keep(kind))

    async def _keep(self, kind: str) -> None:
        """List, watch until it ends, list again. A failed list or watch waits, longer each time."""
        failures = 0
        while True:
            source: Source | None = None
            try:
                source = await self._connect()
                while True:
                    version = await self._list(source, kind)
                    failures = 0
                    try:
                        async with asyncio.timeout(self._relist_s):
                            await self._watch(source, kind, version)
                    except (TimeoutError, Gone):
                        continue
            except SourceError as e:
                failures += 1
                log.warning("the API server cannot be read, the last table stays", extra={"kind": kind, "reason": str(e)})
            finally:
                if source is not None:
                    with contextlib.suppress(SourceError):
                        await source.close()
            await asyncio.sleep(RETRY_S[min(failures, len(RETRY_S)) - 1])

    async def _list(self, source: Source, kind: str) -> str:
        objects, version = await source.list(kind)
        self._stores[kind] = {_uid(o): o for o in objects}
        self._changed()
        return version

    async def _watch(self, source: Source, kind: str, version: str) -> None:
        """Watches on from each end of a watch until the caller's time is over."""
        while True:
            started = asyncio.get_running_loop().time()
            async for event, o in source.watch(kind, version):
                version = str(_object(o, "metadata").get("resourceVersion", version))
                if event == "DELETED":
                    self._stores[kind].pop(_uid(o), None)
                elif event in ("ADDED", "MODIFIED"):
                    self._stores[kind][_uid(o)] = o
                else:
                    continue
                self._changed()
            if asyncio.get_running_loop().time() - started < 1.0:
                await asyncio.sleep(1.0)  # a server that ends watches at once is not hammered

    def _changed(self) -> None:
        if SERVICES not in self._stores or PODS not in self._stores:
            return
        observed = observe(self._stores[SERVICES], self._stores[PODS])
        if observed != self._last:
            self._last = observed
            self._publish(observed)


def _object(o: Json, key: str) -> Json:
    value = o.get(key)
    return value if isinstance(value, Mapping) else {}


def _uid(o: Json) -> str:
    return str(_object(o, "metadata").get("uid", ""))
