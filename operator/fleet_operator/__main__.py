"""`radixfleet-operator`: waits for the Lease, then watches and reconciles until it is told to stop or loses the Lease."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from typing import Final, NoReturn

import fleet_contract.sigterm  # noqa: F401 - before all that takes time to import
from fleet_contract.logs import set_up_logging
from fleet_operator.cluster import KubernetesCluster
from fleet_operator.errors import ClusterError, LeaseLost
from fleet_operator.handlers import watch
from fleet_operator.health import HealthServer
from fleet_operator.leader import Elector
from fleet_operator.loops import MISSED_LIMIT, Inbox, Resync, work
from fleet_operator.metrics import Metrics
from fleet_operator.reconcile import Reconciler
from fleet_operator.routers import HttpRouters, Prober
from fleet_operator.served_names import ServedNames
from fleet_operator.settings import Settings, parse
from fleet_operator.workqueue import WorkQueue

log = logging.getLogger("fleet_operator")
SHUTDOWN_S: Final = 10.0


class Operator:
    """One process: its parts, and how they live and end together."""

    def __init__(self, settings: Settings, cluster: KubernetesCluster) -> None:
        self._settings, self._cluster = settings, cluster
        self._metrics, self._queue, self._served = Metrics(), WorkQueue(), ServedNames()
        self._routers = HttpRouters(settings.router_control_port)
        self._prober = Prober(self._routers, self._queue.add)
        self._inbox = Inbox(self._queue, self._served, settings.watch_namespaces)
        self._resync = Resync(cluster, self._inbox, self._metrics, settings.watch_namespaces)
        self._reconciler = Reconciler(cluster, self._routers, settings, prober=self._prober, served=self._served, metrics=self._metrics)
        self._elector = Elector(cluster, namespace=settings.system_namespace, identity=settings.identity, duration_s=settings.lease_seconds)
        self._health = HealthServer(alive=self._alive, ready=self._ready, metrics=self._metrics_text)
        self._leads = False
        self._lists = False  # the API server has answered a listing

    def _alive(self) -> str | None:
        """That this answers at all shows that the loop runs."""
        if not self._leads:
            return None
        silent_s = time.monotonic() - self._resync.last
        if silent_s > 5 * self._settings.resync_seconds + 60:
            return f"no listing for {silent_s:.0f} s"
        if self._resync.missed_in_a_row >= MISSED_LIMIT:
            return "the watch misses changes"
        return None

    def _ready(self) -> str | None:
        """A standby is ready too: it can take over."""
        return None if self._lists else "the API server has not answered yet"

    def _metrics_text(self) -> str:
        return self._metrics.text(queue_depth=len(self._queue), is_leader=self._elector.is_leader, calls=self._cluster.calls)

    async def run(self) -> None:
        """Until a signal. Raises LeaseLost."""
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await self._health.start(self._settings.health_host, self._settings.health_port)
        stopping = asyncio.create_task(stop.wait(), name="stop")
        try:
            await self._first_listing(stopping)
            acquiring = asyncio.create_task(self._elector.acquire(), name="acquire")
            await asyncio.wait({acquiring, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                acquiring.cancel()
                return
            acquiring.result()  # raises what went wrong
            self._cluster.guard = self._elector.check
            await self._lead()
        finally:
            stopping.cancel()
            await self._health.stop()

    async def _first_listing(self, stopping: asyncio.Task[bool]) -> None:
        """Waits for an API server that knows our kind; says what is wrong while there is none."""
        while not stopping.done():
            try:
                await self._resync.once()
                self._lists = True
                return
            except ClusterError as e:
                hint = "; is the CRD installed?" if e.status == 404 else "; check the operator's rights" if e.status == 403 else ""
                log.warning("the services cannot be listed", extra={"error": e.message + hint})
                await asyncio.wait({stopping}, timeout=2.0)

    async def _lead(self) -> None:
        """All tasks of a leader; the first that ends ends all. kopf ends at a signal."""
        self._leads = True
        self._resync.last = time.monotonic()
        tasks = [
            asyncio.create_task(watch(self._inbox, self._settings), name="watch"),
            asyncio.create_task(self._elector.hold(), name="lease"),
            asyncio.create_task(self._resync.run(self._settings.resync_seconds), name="resync"),
            *(asyncio.create_task(work(self._queue, self._reconciler, self._metrics), name=f"worker {i}") for i in range(self._settings.workers)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises what ended it
        except LeaseLost as e:
            lost_lease(str(e))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=SHUTDOWN_S)
            await self._prober.close()
            await self._elector.release()
            await self._routers.close()


def lost_lease(why: str) -> NoReturn:
    """Ends the process at once: another may be writing already, so nothing of ours may finish."""
    log.error("the Lease is lost; ending at once", extra={"error": why})
    sys.stderr.flush()
    os._exit(1)


async def serve(settings: Settings) -> None:
    """Connects and runs."""
    cluster = await KubernetesCluster.connect(settings.kubeconfig)
    try:
        await Operator(settings, cluster).run()
    finally:
        await cluster.close()


def main() -> None:
    """Console script."""
    settings = parse(sys.argv[1:])
    set_up_logging("operator", settings.log_level)
    if settings.kubeconfig:
        os.environ["KUBECONFIG"] = settings.kubeconfig  # kopf reads the file by itself
    log.info("starting", extra={"identity": settings.identity, "runtime_image": settings.defaults.runtime_image})
    asyncio.run(serve(settings))


if __name__ == "__main__":
    main()
