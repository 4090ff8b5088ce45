"""Restarts everything of a fleet, part after part, while requests come in: `make rolling`, and the end-to-end scenario.

Two routers that are peers, by `kubectl rollout restart`; workers as the README says, by an annotation of their podTemplate (a new revision),
with the operator restarted in the middle; workers pod by pod, as a drained node loses them. No request may fail, and a new router has to
know what its workers hold as soon as it is ready. Each part is a `Stage` of the report.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from fleet_contract import names
from fleet_local.errors import ClusterError
from fleet_local.install import checkout, install_chart, local_values
from fleet_local.pytest_plugin import fresh_state, start, why_no_local_cluster
from fleet_testing.fleet import Fleet, is_ready, manifest, wait_for
from fleet_testing.load import WORDS, Load, steady

SYSTEM: Final = names.SYSTEM_NAMESPACE
ROUTERS: Final = 2
VALUES: Final = {"router.replicas": str(ROUTERS)}
CLIENTS: Final = 5
UNIFIED, PAIR = "roll", "rollpd"
ROLES: Final = {UNIFIED: {"unified": 2}, PAIR: {"prefill": 1, "decode": 1}}  # services, and replicas of their roles
RESOURCES: Final = {"requests": {"cpu": "100m", "memory": "128Mi"}}  # two generations of all of them fit on two cores
STEP_MS: Final = "20"  # a long answer takes two seconds, so that some run whatever is restarted
LIMIT_S: Final = 240
EVERY_S: Final = 2.0  # between two looks by kubectl: each takes processor time from the fleet that is asked
KNOWN: Final = " ".join(WORDS * 8)  # a prompt that workers hold from the beginning


@dataclass(frozen=True, slots=True)
class Stage:
    """What happened while one part was restarted."""

    name: str
    seconds: float
    sent: int
    failed: int


@dataclass
class Report:
    """A whole run. `trouble`: why it could not be done to the end."""

    load: Load = field(default_factory=Load)
    stages: list[Stage] = field(default_factory=list)
    trouble: str = ""

    @property
    def is_clean(self) -> bool:
        return not self.trouble and not self.load.failed and self.load.ok == self.load.sent

    def table(self) -> str:
        """One line a stage, then what failed."""
        head = f"{'restarted':<40} {'seconds':>8} {'requests':>9} {'failed':>7}"
        rows = [f"{s.name:<40} {s.seconds:>8.1f} {s.sent:>9} {s.failed:>7}" for s in self.stages]
        last = f"{'in all':<40} {sum(s.seconds for s in self.stages):>8.1f} {self.load.sent:>9} {len(self.load.failed):>7}"
        slowest = f"slowest answer {self.load.slowest_s:.2f} s"
        return "\n".join([head, *rows, last, slowest, *self.load.failed[:20], *([self.trouble] if self.trouble else [])])


def services(namespace: str) -> list[Mapping[str, Any]]:
    """What is asked."""
    engine = {"contextLength": 2048, "kvCache": {"memory": "16Mi"}, "args": {"executor": "simulated", "simulated-step-base-ms": STEP_MS}}
    return [
        manifest(
            name, namespace, model={"uri": "simulated://", "name": name}, engine=engine,
            **{role: {"replicas": n, "resources": RESOURCES} for role, n in roles.items()},
        )
        for name, roles in ROLES.items()
    ]  # fmt: skip


# -- what routers know


def told(fleet: Fleet, router: dict[str, Any], path: str) -> dict[str, Any]:
    """JSON of a router's control port."""
    return json.loads(fleet.raw(router, names.ROUTER_CONTROL_PORT, path))  # type: ignore[no-any-return]


def known_tokens(fleet: Fleet, router: dict[str, Any], namespace: str) -> int:
    """How much of the known prompt a router believes some worker to hold."""
    body = {"model": f"{namespace}/{UNIFIED}", "messages": [{"role": "user", "content": KNOWN}]}
    decision = fleet.post(router, names.ROUTER_CONTROL_PORT, "/debug/route", body)
    return max(w["hitTokens"] for w in decision["workers"])


def ask_known(fleet: Fleet, namespace: str) -> int:
    """Has the prompt computed; gives what every router knows of it then."""
    body = {"model": f"{namespace}/{UNIFIED}", "messages": [{"role": "user", "content": KNOWN}], "max_tokens": 2}
    assert httpx.post(f"{fleet.url}/v1/chat/completions", json=body, timeout=60).status_code == 200

    def agreed() -> int | None:
        known = {known_tokens(fleet, r, namespace) for r in fleet.routers()}
        return known.pop() if len(known) == 1 else None

    return wait_for(agreed, within_s=60, every_s=EVERY_S, what="all routers know the prompt")


def routers_agree(fleet: Fleet) -> None:
    """All routers are peers, and list the same ready workers."""

    def agree() -> bool:
        routers = fleet.routers()
        peers = [told(fleet, r, "/readyz")["peers"] for r in routers]
        metrics = [fleet.raw(r, names.ROUTER_CONTROL_PORT, "/metrics") for r in routers]
        lists = [{(w["pod"], w["podUid"], w["incarnation"], w["state"]) for w in told(fleet, r, "/workers")["workers"]} for r in routers]
        samples = [f'radixfleet_router_peers{{state="{state}"}} {ROUTERS - 1}\n' for state in ("expected", "live")]
        return (
            peers == [{"expected": ROUTERS - 1, "live": ROUTERS - 1}] * ROUTERS
            and all(sample in text for text in metrics for sample in samples)
            and all(seen == lists[0] for seen in lists)
            and {state for *_, state in lists[0]} == {"ready"}
        )

    wait_for(agree, within_s=LIMIT_S, every_s=EVERY_S, what="every router hears every other and lists the same workers")


# -- restarts


def uids(fleet: Fleet, namespace: str, selector: str) -> set[str]:
    """Of the pods that are there, those that end included."""
    return {p["metadata"]["uid"] for p in fleet.list("pods", namespace, selector)}


def await_gone(fleet: Fleet, namespace: str, selector: str, old: set[str]) -> None:
    wait_for(lambda: not old & uids(fleet, namespace, selector), within_s=LIMIT_S, every_s=EVERY_S, what=f"the old pods of {selector} are gone")


def restart(fleet: Fleet, component: str, on_ready: Callable[[dict[str, Any]], None] = lambda pod: None) -> None:
    """`kubectl rollout restart` of a Deployment, until nothing of the old pods is left. `on_ready` gets each new pod when it is ready."""
    selector = f"{names.LABEL_COMPONENT}={component}"
    before = uids(fleet, SYSTEM, selector)
    seen: set[str] = set()
    fleet.kubectl("rollout", "restart", f"deployment/radixfleet-{component}", "-n", SYSTEM)

    def all_ready() -> bool:
        for pod in fleet.list("pods", SYSTEM, selector):
            uid = pod["metadata"]["uid"]
            if uid not in before | seen and is_ready(pod):
                seen.add(uid)
                on_ready(pod)
        return len(seen) == len(before)

    wait_for(all_ready, within_s=LIMIT_S, every_s=EVERY_S, what=f"new pods of {component}")
    await_gone(fleet, SYSTEM, selector, before)


def restart_routers(fleet: Fleet, namespace: str) -> None:
    """A router that is ready is warm: it knows what the ones before it knew."""
    before = ask_known(fleet, namespace)
    assert before >= 256, before

    def is_warm(router: dict[str, Any]) -> None:
        events, known = told(fleet, router, "/readyz")["events"], known_tokens(fleet, router, namespace)
        assert (events["live"], known) == (events["expected"], before), f"a new router is ready and knows {known} of {before} tokens: {events}"

    restart(fleet, names.COMPONENT_ROUTER, is_warm)


def await_workers(fleet: Fleet, service: str, namespace: str, old: set[str]) -> None:
    """Until nothing of the old pods is left and the service is Ready with as many others as it wants."""
    await_gone(fleet, namespace, f"{names.LABEL_SERVICE}={service}", old)
    pods = sum(ROLES[service].values())
    wait_for(lambda: len(fleet.ready_pods(service, namespace)) == pods, within_s=LIMIT_S, every_s=EVERY_S, what=f"{pods} ready pods of {service}")
    fleet.wait_ready(service, namespace)


def restart_workers(fleet: Fleet, namespace: str) -> None:
    """A new revision of one service after the other, and the operator restarted when the first one's pods begin to come."""
    for service, roles in ROLES.items():
        selector = f"{names.LABEL_SERVICE}={service}"
        before = uids(fleet, namespace, selector)
        again = {"podTemplate": {"annotations": {"restarted-at": uuid.uuid4().hex}}}
        patch = json.dumps({"spec": dict.fromkeys(roles, again)})
        fleet.kubectl("patch", "infsvc", service, "-n", namespace, "--type=merge", "-p", patch)
        if service == UNIFIED:

            def new_pods(selector: str = selector, before: set[str] = before) -> set[str]:
                return uids(fleet, namespace, selector) - before

            wait_for(new_pods, within_s=LIMIT_S, every_s=EVERY_S, what="pods of the new revision")
            restart(fleet, names.COMPONENT_OPERATOR)
        await_workers(fleet, service, namespace, before)


def delete_one_by_one(fleet: Fleet, namespace: str) -> None:
    """Each unified worker in its turn, when all are ready again."""
    for meta in sorted((p["metadata"] for p in fleet.pods(UNIFIED, namespace)), key=lambda m: str(m["name"])):
        fleet.kubectl("delete", "pod", meta["name"], "-n", namespace, "--wait=false")
        await_workers(fleet, UNIFIED, namespace, {meta["uid"]})


# -- a run


async def roll(
    fleet: Fleet, namespace: str, *, per_s: float = 50, rounds: int = 1, pod_by_pod: bool = False, say: Callable[[str], None] = print
) -> Report:
    """Applies the services and does the whole run. Nothing is raised for what fails: the report tells."""
    fleet.apply(*services(namespace))
    for name in ROLES:
        await asyncio.to_thread(fleet.wait_ready, name, namespace)
    await asyncio.to_thread(routers_agree, fleet)
    report = Report()
    parts = {"two routers": restart_routers, "workers, and the operator meanwhile": restart_workers}
    if pod_by_pod:
        parts["workers pod by pod"] = delete_one_by_one
    async with steady(fleet.url, [f"{namespace}/{name}" for name in ROLES], per_s=per_s, clients=CLIENTS) as load:
        report.load = load

        async def stage(name: str, work: Callable[[], Awaitable[None]]) -> None:
            load.stage, sent, failed, began = name, load.sent, len(load.failed), time.monotonic()
            await work()
            report.stages.append(Stage(name, time.monotonic() - began, load.sent - sent, len(load.failed) - failed))
            say(f"{name}: {report.stages[-1].seconds:.1f} s, {report.stages[-1].failed} failed")

        try:
            for _ in range(rounds):
                for name, part in parts.items():
                    await stage(name, lambda part=part: asyncio.to_thread(part, fleet, namespace))
            await stage("nothing any more", lambda: asyncio.sleep(2))
            await asyncio.to_thread(routers_agree, fleet)
        except (AssertionError, ClusterError) as e:
            report.trouble = f"{load.stage}: {e}"
    return report


def main() -> int:
    """`make rolling`: a cluster of its own, a table, exit code 1 when anything failed."""
    p = argparse.ArgumentParser(description="Rolling restarts of a whole fleet on a real cluster, under load (Linux, root).")
    p.add_argument("--rounds", type=int, default=3, help="how often everything is restarted; default 3")
    p.add_argument("--rate", type=float, default=50, help="requests a second; default 50")
    options = p.parse_args()
    if (reason := why_no_local_cluster()) is not None:
        print(reason, file=sys.stderr)
        return 2
    with fresh_state() as state:
        cluster = start(state)
        install_chart(cluster, checkout(), {**local_values(), **VALUES})
        cluster.kubectl("create", "namespace", "rolling")

        def kubectl(*args: str, input: str | None = None) -> str:
            return cluster.kubectl(*args, stdin=input).stdout

        fleet = Fleet(kubectl, cluster.router_url.removesuffix("/v1"))
        report = asyncio.run(roll(fleet, "rolling", per_s=options.rate, rounds=options.rounds, pod_by_pod=True))
        print(report.table())
    return 0 if report.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
