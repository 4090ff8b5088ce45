"""Asks the routers over HTTP (contract section 6): what they have of a service, and whether a request goes through a revision.

Every call is short: a frozen router must not hold up a drain's deadline. Probes run as tasks of their own and report by enqueueing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import aiohttp

from fleet_contract import names
from fleet_operator.facts import Key, Obj, ProbeResult, RouterReport, WorkerReport

log = logging.getLogger(__name__)
REPORT_TIMEOUT_S: Final = 1.0
PROBE_TIMEOUT_S: Final = 35.0  # the router's own limit is 30
PROBE_RETRY_S: Final = (1.0, 2.0, 5.0, 10.0, 30.0)


class Routers(Protocol):
    """What the operator asks of routers. Neither call raises: a router that does not answer is a fact."""

    async def reports(self, key: Key, pods: Sequence[Obj]) -> tuple[RouterReport, ...]:
        """What each router pod says of the service."""

    async def probe(self, key: Key, address: str, revision: str) -> ProbeResult:
        """One request through a revision by the router at an address."""


class HttpRouters:
    """The real routers."""

    def __init__(self, control_port: int = names.ROUTER_CONTROL_PORT) -> None:
        self._port = control_port
        self._session: aiohttp.ClientSession | None = None

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            # A connection per call: a kept one of a frozen or replaced router would cost the timeout of the next question.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))
        return self._session

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()

    async def reports(self, key: Key, pods: Sequence[Obj]) -> tuple[RouterReport, ...]:
        """See Routers. All are asked at once, so the whole takes REPORT_TIMEOUT_S at most."""
        return tuple(await asyncio.gather(*(self._report(key, pod) for pod in pods)))

    async def _report(self, key: Key, pod: Obj) -> RouterReport:
        name, address = pod["metadata"]["name"], self._address(pod)
        try:
            timeout = aiohttp.ClientTimeout(total=REPORT_TIMEOUT_S)
            async with self._http().get(f"http://{address}/fleet/{key.namespace}/{key.name}", timeout=timeout) as answer:
                if answer.status != 200:
                    return RouterReport(name, address, error=f"it answered {answer.status}")
                return read_report(name, address, await answer.json(content_type=None))
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as e:
            return RouterReport(name, address, error=str(e) or f"no answer within {REPORT_TIMEOUT_S:g} s")

    def _address(self, pod: Obj) -> str:
        ip = str((pod.get("status") or {}).get("podIP"))
        return f"[{ip}]:{self._port}" if ":" in ip else f"{ip}:{self._port}"

    async def probe(self, key: Key, address: str, revision: str) -> ProbeResult:
        """See Routers."""
        try:
            timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
            url = f"http://{address}/fleet/{key.namespace}/{key.name}/probe"
            async with self._http().post(url, json={"revision": revision}, timeout=timeout) as answer:
                data = await answer.json(content_type=None)
                if answer.status != 200 or not isinstance(data, dict):
                    return ProbeResult(False, f"the router answered {answer.status}")
                return ProbeResult(data.get("ok") is True, error_text(data.get("error")))
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as e:
            return ProbeResult(False, str(e) or f"no answer within {PROBE_TIMEOUT_S:g} s")


def error_text(error: Any) -> str:
    """The probe's error, as a text or as the error object of every HTTP surface."""
    if isinstance(error, dict):
        inner = error.get("error", error)
        return str(inner.get("message", inner) if isinstance(inner, dict) else inner)[:500]
    return "" if error is None else str(error)[:500]


def running_routers(pods: Sequence[Obj]) -> list[Obj]:
    """The router pods that may hold a request: they have an address and are in no terminal phase. A terminating one still counts."""
    found = [p for p in pods if (p.get("status") or {}).get("podIP") and (p["status"].get("phase") not in ("Succeeded", "Failed"))]
    return sorted(found, key=lambda p: str(p["metadata"]["name"]))


def read_report(pod: str, address: str, data: Any) -> RouterReport:
    """Reads `GET /fleet`: unknown fields are ignored, missing ones get a default. Raises ValueError for what is no object at all."""
    if not isinstance(data, dict):
        raise ValueError(f"the router answered {type(data).__name__}, not an object")
    workers: dict[str, Mapping[str, WorkerReport]] = {}
    for revision, said in (data.get("revisions") or {}).items():
        found = [_read_worker(w) for w in (said or {}).get("workers") or () if isinstance(w, dict)]
        workers[str(revision)] = _by_pod(found)
    return RouterReport(pod, address, data.get("synced") is True, workers)


def _read_worker(data: Mapping[str, Any]) -> WorkerReport:
    deadline = data.get("drainDeadline")
    return WorkerReport(
        pod_uid=str(data.get("podUid", "")),
        role=str(data.get("role", "")),
        state=str(data.get("state", "")),
        inflight=int(data.get("inflight") or 0),
        drain_deadline=None if deadline is None else str(deadline),
    )


def _by_pod(workers: Sequence[WorkerReport]) -> dict[str, WorkerReport]:
    """One record per pod: with several ranks, requests add up, and the pod is ready or drained only when all its ranks are."""
    found: dict[str, WorkerReport] = {}
    for worker in workers:
        other = found.get(worker.pod_uid)
        if other is not None:
            state = worker.state if worker.state == other.state else next(s for s in (worker.state, other.state) if s != "ready")
            deadline = worker.drain_deadline if worker.drain_deadline == other.drain_deadline else None
            worker = WorkerReport(worker.pod_uid, worker.role, state, worker.inflight + other.inflight, deadline)
        found[worker.pod_uid] = worker
    return found


class Prober:
    """Asks once per revision and operator life, again when the revision was lost, and again after a while when it failed."""

    def __init__(self, routers: Routers, enqueue: Callable[[Key], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._routers, self._enqueue, self._clock = routers, enqueue, clock
        self._results: dict[tuple[str, str], ProbeResult] = {}  # (service uid, revision)
        self._failures: dict[tuple[str, str], tuple[int, float]] = {}  # count, not before
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}

    def results(self, uid: str) -> dict[str, ProbeResult]:
        """What is known, by revision."""
        return {revision: result for (of, revision), result in self._results.items() if of == uid}

    def want(self, key: Key, uid: str, revision: str, address: str) -> None:
        """Starts a probe unless it is known to be good, under way, or failed a moment ago."""
        slot = (uid, revision)
        known = self._results.get(slot)
        if slot in self._tasks or (known is not None and known.is_ok) or self._clock() < self._failures.get(slot, (0, 0.0))[1]:
            return
        self._tasks[slot] = asyncio.create_task(self._run(key, slot, address), name=f"probe {key.namespace}/{key.name} {revision}")

    async def _run(self, key: Key, slot: tuple[str, str], address: str) -> None:
        try:
            result = await self._routers.probe(key, address, slot[1])
            log.info("probe", extra={"service": f"{key.namespace}/{key.name}", "revision": slot[1], "ok": result.is_ok, "error": result.error})
            self._results[slot] = result
            if result.is_ok:
                self._failures.pop(slot, None)
            else:
                count = self._failures.get(slot, (0, 0.0))[0]
                self._failures[slot] = (count + 1, self._clock() + PROBE_RETRY_S[min(count, len(PROBE_RETRY_S) - 1)])
        finally:
            self._tasks.pop(slot, None)
            self._enqueue(key)

    def forget(self, uid: str, *, keep: frozenset[str] = frozenset()) -> None:
        """Drops what is known of a service's revisions but those in `keep`: they are asked again when they are back."""
        for slot in [s for s in {*self._results, *self._failures} if s[0] == uid and s[1] not in keep]:
            self._results.pop(slot, None)
            self._failures.pop(slot, None)

    async def close(self) -> None:
        """Ends the probes that are under way."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
