"""An operator over a FakeCluster: runs looks and controllers in turn until nothing changes, and can be killed and started anew."""

from __future__ import annotations

import asyncio
from typing import Any

from fleet_contract import names
from fleet_operator.cluster import INFERENCE_SERVICE, POD, STATEFUL_SET
from fleet_operator.errors import ClusterError
from fleet_operator.facts import Key, Obj
from fleet_operator.metrics import Metrics
from fleet_operator.reconcile import Reconciler
from fleet_operator.routers import Prober
from fleet_operator.served_names import ServedNames
from fleet_operator.settings import Defaults, Settings
from fleet_testing.fake_cluster import Crash, FakeCluster, FakeRouters

PAIR: Obj = {"model": {"uri": "simulated://"}, "prefill": {"replicas": 1}, "decode": {"replicas": 1}, "drain": {"timeoutSeconds": 30}}


def pair(**changes: Any) -> Obj:
    """A prefill/decode spec."""
    return {**PAIR, **changes}


class World:
    """Cluster, routers and one operator process after another."""

    def __init__(self, routers: int = 1, image: str = "runtime:1") -> None:
        self.cluster = FakeCluster()
        self.routers = FakeRouters(self.cluster, routers)
        self.image = image
        self.start()

    def start(self) -> None:
        """A new operator process: everything in memory is lost."""
        settings = Settings(Defaults(self.image, version="1"), identity="test", system_namespace=names.SYSTEM_NAMESPACE)
        self.served, self.metrics = ServedNames(), Metrics()
        self.prober = Prober(self.routers, lambda key: None, clock=lambda: self.cluster.now.timestamp())  # type: ignore[arg-type]
        self.reconciler = Reconciler(
            self.cluster,
            self.routers,  # type: ignore[arg-type]
            settings,
            prober=self.prober,
            served=self.served,
            metrics=self.metrics,
            now=lambda: self.cluster.now,
        )

    async def look(self, name: str = "chat", namespace: str = "demo") -> float | None:
        """One reconcile, and the probes that it started; a passing error is what the queue would retry."""
        for obj in await self.cluster.list(INFERENCE_SERVICE, None):
            self.served.update(obj)
        try:
            return await self.reconciler.reconcile(Key(namespace, name))
        except ClusterError:
            return 0.0
        finally:
            for _ in range(5):
                await asyncio.sleep(0)

    async def turn(self, name: str = "chat", seconds: float = 1.0) -> None:
        """Operator, controllers, clock."""
        await self.look(name)
        self.cluster.run_controllers()
        self.cluster.pass_time(seconds)

    async def settle(self, name: str = "chat", limit: int = 100) -> int:
        """Turns until three in a row write nothing; returns how many it took. Fails when it never ends."""
        quiet = 0
        for turn in range(limit):
            before = (len(self.cluster.writes), self.snapshot())
            try:
                await self.turn(name)
            except Crash:
                self.start()
            quiet = quiet + 1 if before == (len(self.cluster.writes), self.snapshot()) else 0
            if quiet == 3:
                return turn
        raise AssertionError(f"never at rest; last writes: {self.cluster.writes[-10:]}")

    def snapshot(self) -> list[str]:
        """Names and versions of all objects."""
        return [f"{slot} {obj['metadata']['resourceVersion']}" for slot, obj in sorted(self.cluster.objects.items())]

    def shape(self) -> dict[str, Any]:
        """The end state without uids, versions and times."""
        sets = {o["metadata"]["name"]: (o["spec"]["replicas"], o["metadata"].get("annotations", {})) for o in self.cluster.of_kind(STATEFUL_SET)}
        pods = {o["metadata"]["name"]: o["metadata"].get("annotations", {}) for o in self.cluster.of_kind(POD)}
        others = sorted(slot for slot in self.cluster.objects if slot[0] in ("Service", "ConfigMap", "ControllerRevision"))
        return {"sets": sets, "pods": pods, "others": others}

    def sets(self) -> dict[str, int]:
        """Replicas by StatefulSet."""
        return {o["metadata"]["name"]: o["spec"]["replicas"] for o in self.cluster.of_kind(STATEFUL_SET)}
