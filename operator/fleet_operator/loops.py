"""The tasks of a leading operator: workers that take services from the queue, and the listing that repairs lost events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from fleet_operator.cluster import INFERENCE_SERVICE, Cluster
from fleet_operator.errors import ClusterError, LeaseLost
from fleet_operator.facts import Key, Obj
from fleet_operator.metrics import Metrics
from fleet_operator.reconcile import Reconciler
from fleet_operator.served_names import ServedNames
from fleet_operator.workqueue import WorkQueue

log = logging.getLogger(__name__)
LOOK_LIMIT_S: Final = 120.0  # a look that takes longer hangs
MISSED_LIMIT: Final = 2  # listings in a row that found missed events: the watch is dead


class Inbox:
    """Where events arrive. Any event only enqueues the service it belongs to."""

    def __init__(self, queue: WorkQueue, served: ServedNames, namespaces: tuple[str, ...]) -> None:
        self._queue, self._served, self._namespaces = queue, served, namespaces
        self._seen: dict[Key, str] = {}  # resourceVersion of the last event

    def service(self, obj: Obj, *, is_deleted: bool) -> None:
        """A service changed."""
        key = Key(obj["metadata"]["namespace"], obj["metadata"]["name"])
        if is_deleted:
            self._seen.pop(key, None)
            rivals = self._served.remove(key)
        else:
            self._seen[key] = str(obj["metadata"]["resourceVersion"])
            rivals = self._served.update(obj)
        for changed in (key, *rivals):
            self.want(changed)

    def service_listed(self, obj: Obj) -> None:
        """A service as a listing found it: looked at like any event, but the watch gets no credit for it."""
        key = Key(obj["metadata"]["namespace"], obj["metadata"]["name"])
        for changed in (key, *self._served.update(obj)):
            self.want(changed)

    def child(self, namespace: str, service: str) -> None:
        """Something of a service changed."""
        self.want(Key(namespace, service))

    def router(self) -> None:
        """A router pod changed: all services may be affected."""
        for key in self._served.known():
            self.want(key)

    def want(self, key: Key) -> None:
        """Enqueues a service of the namespaces that are served."""
        if not self._namespaces or key.namespace in self._namespaces:
            self._queue.add(key)

    def seen(self, key: Key) -> str | None:
        """resourceVersion of the last event of a service."""
        return self._seen.get(key)

    def known(self) -> set[Key]:
        """Services that events told of."""
        return set(self._seen)


class Resync:
    """Lists all services now and then, enqueues each, and counts what the watch has missed since the last listing."""

    def __init__(self, cluster: Cluster, inbox: Inbox, metrics: Metrics, namespaces: tuple[str, ...]) -> None:
        self._cluster, self._inbox, self._metrics, self._namespaces = cluster, inbox, metrics, namespaces
        self._suspects: dict[Key, str] = {}  # what the last listing found unseen
        self.missed_in_a_row = 0
        self.last = time.monotonic()

    async def once(self) -> None:
        """One listing. Raises ClusterError."""
        listed: dict[Key, Obj] = {}
        for namespace in self._namespaces or (None,):
            for obj in await self._cluster.list(INFERENCE_SERVICE, namespace):
                listed[Key(obj["metadata"]["namespace"], obj["metadata"]["name"])] = obj
        unseen = {key: str(obj["metadata"]["resourceVersion"]) for key, obj in listed.items()}
        unseen = {key: version for key, version in unseen.items() if self._inbox.seen(key) != version}
        # Unseen twice with the same version: the event had a whole period to arrive.
        missed = [key for key, version in unseen.items() if self._suspects.get(key) == version]
        gone = self._inbox.known() - set(listed)
        self._suspects = unseen
        self.missed_in_a_row = self.missed_in_a_row + 1 if missed else 0
        self._metrics.watch_missed += len(missed)
        self._metrics.resyncs += 1
        self.last = time.monotonic()
        for key in missed:
            log.warning("the watch missed a change", extra={"service": f"{key.namespace}/{key.name}"})
        for obj in listed.values():
            self._inbox.service_listed(obj)
        for key in gone:
            self._inbox.service({"metadata": {"namespace": key.namespace, "name": key.name}}, is_deleted=True)

    async def run(self, period_s: float) -> None:
        """For ever; an API server that does not answer is asked again at the next turn."""
        while True:
            await asyncio.sleep(period_s)
            try:
                await self.once()
            except ClusterError as e:
                log.warning("the services cannot be listed", extra={"error": e.message})


async def work(queue: WorkQueue, reconciler: Reconciler, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
    """One worker, for ever. The border of a look: whatever it raises is logged and tried again later, but a lost Lease ends the process."""
    while True:
        key = await queue.get()
        service = f"{key.namespace}/{key.name}"
        began = clock()
        try:
            async with asyncio.timeout(LOOK_LIMIT_S):
                again_s = await reconciler.reconcile(key)
        except LeaseLost:
            raise
        except ClusterError as e:
            metrics.looks["failed"] += 1
            wait_s = queue.failed(key)
            level = logging.INFO if e.is_passing else logging.WARNING
            log.log(level, "look failed", extra={"service": service, "error": e.message, "status": e.status, "again_s": round(wait_s, 1)})
        except TimeoutError:
            metrics.looks["failed"] += 1
            queue.failed(key)
            log.error("look took too long", extra={"service": service, "limit_s": LOOK_LIMIT_S})
        except Exception:
            metrics.looks["crashed"] += 1
            queue.failed(key)
            log.exception("look crashed", extra={"service": service})
        else:
            metrics.looks["ok"] += 1
            queue.done(key, again_s=again_s)
        metrics.look_seconds += clock() - began
