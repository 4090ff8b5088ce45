"""Which workers there are and how they are: asks every endpoint in the way of its engine, and listens to load reports.

Engines that send no reports are asked for their load: often while they work, rarely while they idle. Lives on the edge's event loop.
Endpoints come from flags (static) or discovery (pods); a worker's identity comes from its own record.
Changes are told to the brain by one callback; the brain decides, this module only gathers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec
import zmq
import zmq.asyncio

from fleet_contract import names
from fleet_contract.errors import ApiError
from fleet_contract.worker import LoadReport, WorkerRecord
from fleet_router.decide.load import REPORT_LIFE_S
from fleet_router.engines.base import Fetch, PolledLoad, key_headers
from fleet_router.engines.kinds import engine_of
from fleet_router.errors import CODE_WORKER_TIMEOUT, OUT_OF_FILES, UNDECODABLE
from fleet_router.grid import not_before
from fleet_router.http.client import Pool, fetch
from fleet_router.observed import PodFacts
from fleet_router.target import Target

log = logging.getLogger(__name__)

ASK_TIMEOUT_S: Final = 2.0
COARSE_S: Final = 1.0  # pauses from here on may be a little longer, so that several workers are asked in one go:
STEP_S: Final = 0.25
FAST_POLL_S: Final = 0.25  # while an endpoint is not ready
IDLE_FACTOR: Final = 3  # an idle worker of another engine is asked so much less often: a request finds out by itself when it is gone
IDLE_LOAD_EVERY: Final = 2  # polls between two questions for the load of a worker that had none
CODE_UNREACHABLE: Final = "worker_unreachable"
NOT_REACHED: Final = (CODE_UNREACHABLE, CODE_WORKER_TIMEOUT, "worker_lost")
FULL_READ_EVERY: Final = 10  # polls between two reads of the whole record
MISSES: Final = 2  # polls in a row without an answer after which a ready worker counts as stalled: one may be a busy machine
MISSES_OF_REPORTING: Final = 5  # the same, while its load reports still come: its scheduler works, only its http process is slow
MISSES_AT_START: Final = 5  # the same for one that Kubernetes calls ready and that never answered us: a new router is not ready without it


@dataclass(slots=True, eq=False)
class Endpoint:
    """One port we ask. `pod` is None in static mode."""

    key: str
    host: str
    port: int
    pod: PodFacts | None = None
    record: WorkerRecord | None = None
    healthy: bool = False
    ever_healthy: bool = False
    asked: bool = False
    answered: bool = False  # once at least, if only by refusing the connection
    removed: bool = False
    answers: bool = False  # whatever it says: it was reached by the last poll that counts
    missed: int = 0  # polls in a row without an answer
    reported_at: float = float("-inf")  # loop time of the last load report of this incarnation
    reason: str = ""
    task: asyncio.Task[None] | None = None
    wake: asyncio.Event | None = None
    load_address: str = ""
    named: Target | None = None  # by a user; else it is our runtime
    life: int = 0  # grows while it cannot be reached: an engine that names no incarnation has a new one afterwards
    load: PolledLoad | None = None
    is_drained: bool = False  # by REST

    @property
    def target(self) -> Target:
        return self.named or Target(self.host, self.port)

    @property
    def has_told(self) -> bool:
        """Whether it is known how this endpoint is: it was asked, and answered, refused, or is not worth waiting for."""
        return self.asked and (self.answered or self.pod is None or not self.pod.ready or self.missed >= MISSES_AT_START)

    @property
    def drain_deadline(self) -> str | None:
        return self.pod.drain_deadline if self.pod is not None else None


def worker_state(endpoint: Endpoint, *, draining: bool) -> str:
    """The state of an endpoint's worker, from facts only.

    A pod that is going (deletion, annotation) drains; so does a worker that says so itself or was told by REST, as long as it answers: one
    that has ended drains no more. A pod that Kubernetes calls not ready, or that does not answer itself, is starting before its first
    success and stalled after it.
    """
    pod = endpoint.pod
    if endpoint.removed or (pod is not None and pod.terminal):
        return "failed"
    if pod is not None and (pod.deleting or pod.drain_deadline is not None):
        return "draining"
    if endpoint.answers and (draining or endpoint.is_drained):
        return "draining"
    if endpoint.healthy and (pod is None or pod.ready):
        return "ready"
    return "stalled" if endpoint.ever_healthy else "starting"


class Registry:
    """All endpoints. `on_change(endpoint)` after each change of record or health; `on_load(topic, report)` for each load report, `on_polled`
    for each answer of an engine that has to be asked."""

    def __init__(
        self, pool: Pool, *, poll_interval_s: float, on_change: Callable[[Endpoint], None], on_load: Callable[[str, LoadReport], None]
    ) -> None:
        self.endpoints: dict[str, Endpoint] = {}
        self._pool = pool
        self._poll_interval_s = poll_interval_s
        self._on_change = on_change
        self._on_load = on_load
        self.on_polled: Callable[[Endpoint, PolledLoad], None] = lambda endpoint, load: None
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.BLOCKY, 0)  # its end waits for nobody, also when it is only forgotten
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"load@")
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        self._listener: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to listen to load reports."""
        self._listener = asyncio.get_running_loop().create_task(self._listen())

    async def close(self) -> None:
        """Ends all polling."""
        for endpoint in list(self.endpoints.values()):
            self.remove(endpoint.key)
        if self._listener is not None:
            self._listener.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._listener
        self._socket.close()
        self._context.destroy(linger=0)

    def set_static(self, targets: list[Target]) -> None:
        """The endpoints of static mode."""
        for target in targets:
            self.add(target)

    def add(self, target: Target) -> Endpoint | None:
        """One more endpoint of static mode; None when its address is taken."""
        if target.key in self.endpoints:
            return None
        endpoint = Endpoint(target.key, target.host, target.port, named=target)
        self._add(endpoint)
        return endpoint

    def drain(self, key: str, *, is_drained: bool) -> None:
        """A static worker gets nothing new from now on, or does again."""
        endpoint = self.endpoints[key]
        if endpoint.is_drained != is_drained:
            endpoint.is_drained = is_drained
            self._on_change(endpoint)

    def set_pods(self, pods: list[PodFacts]) -> None:
        """The worker pods of a discovery snapshot: new ones are asked, gone ones are removed, changed ones are told on at once."""
        wanted = {p.uid: p for p in pods if p.ip and not p.terminal}
        for key in [k for k, e in self.endpoints.items() if k not in wanted or e.host != wanted[k].ip]:
            self.remove(key)
        for uid, pod in wanted.items():
            endpoint = self.endpoints.get(uid)
            if endpoint is None:
                self._add(Endpoint(uid, pod.ip, names.RUNTIME_INTERNAL_PORT, pod))
            elif endpoint.pod != pod:
                endpoint.pod = pod
                self._on_change(endpoint)
                self.poke(uid)

    def poke(self, key: str) -> None:
        """Ask this endpoint again now: something about it is doubtful."""
        endpoint = self.endpoints.get(key)
        if endpoint is not None and endpoint.wake is not None:
            endpoint.wake.set()

    def suspect(self, key: str, why: str) -> None:
        """A request found the worker unreachable or stale: not ready until it answers again."""
        endpoint = self.endpoints.get(key)
        if endpoint is not None:
            if endpoint.healthy:
                endpoint.healthy, endpoint.reason = False, why
                self._on_change(endpoint)
            self.poke(key)

    def remove(self, key: str) -> None:
        """The endpoint is no more."""
        endpoint = self.endpoints.pop(key, None)
        if endpoint is None:
            return
        endpoint.removed = True
        if endpoint.task is not None:
            endpoint.task.cancel()
        self._connect_load(endpoint, "")
        self._on_change(endpoint)

    def _add(self, endpoint: Endpoint) -> None:
        self.endpoints[endpoint.key] = endpoint
        endpoint.wake = asyncio.Event()
        endpoint.task = asyncio.get_running_loop().create_task(self._poll(endpoint))

    async def _poll(self, endpoint: Endpoint) -> None:
        assert endpoint.wake is not None
        polls = 0
        while True:
            doubtful = endpoint.wake.is_set()
            endpoint.wake.clear()
            await self._ask(endpoint, full=doubtful or not endpoint.healthy or polls % FULL_READ_EVERY == 0)
            if endpoint.healthy and (endpoint.load != PolledLoad() or polls % IDLE_LOAD_EVERY == 0):
                await self._ask_load(endpoint)
            polls += 1
            sure = endpoint.healthy and not endpoint.missed
            pause = self._poll_interval_s if sure else min(FAST_POLL_S, self._poll_interval_s)
            if sure and endpoint.load == PolledLoad():
                pause *= IDLE_FACTOR
            until = asyncio.get_running_loop().time() + pause
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(not_before(until, STEP_S) if pause >= COARSE_S else until):
                    await endpoint.wake.wait()

    async def _ask(self, endpoint: Endpoint, *, full: bool) -> None:
        """One poll: health, and the record when it may have changed."""
        record, reason = endpoint.record, ""
        engine = engine_of(endpoint.target.engine)
        ask = self._fetch_of(endpoint)
        try:
            reason = await engine.trouble(ask)
            healthy = not reason
            if (full or record is None) and (healthy or engine.kind == names.ENGINE_OURS):
                record = await engine.record(ask, endpoint.target, record, str(endpoint.life))
            endpoint.missed, endpoint.answered, answers = 0, True, True
        except (ApiError, *UNDECODABLE) as e:
            if isinstance(e, ApiError) and e.code == OUT_OF_FILES:
                return  # it was not even asked: what we knew stands
            if isinstance(e, ApiError) and e.code == CODE_UNREACHABLE:
                endpoint.life += 1
            healthy, reason = self._survives(endpoint, e), str(e)
            answers = healthy or not isinstance(e, ApiError) or e.code not in NOT_REACHED
        if endpoint.pod is not None and record is not None and record.pod_uid != endpoint.pod.uid:
            record, reason = None, "another pod answers at this address"  # the address was given to a new pod
        if healthy and record is None and not reason:
            reason = "/readyz answers but /worker does not; give the internal port of a runtime (--internal-port), or the engine, as vllm+http://"
        healthy = healthy and record is not None
        changed = (healthy, record, answers, reason) != (endpoint.healthy, endpoint.record, endpoint.answers, endpoint.reason) or not endpoint.asked
        endpoint.asked, endpoint.answers = True, answers
        endpoint.healthy, endpoint.record, endpoint.reason = healthy, record, reason
        endpoint.ever_healthy = endpoint.ever_healthy or healthy
        if changed and not endpoint.removed:
            level = logging.INFO if healthy or endpoint.pod is not None else logging.WARNING  # a pod that is starting is nothing odd
            log.log(level, "worker %s", "answers" if healthy else "is not ready", extra={"worker": endpoint.key, "reason": reason})
            if record is not None and record.ports.load:
                self._connect_load(endpoint, f"tcp://{f'[{endpoint.host}]' if ':' in endpoint.host else endpoint.host}:{record.ports.load}")
            self._on_change(endpoint)

    def _survives(self, endpoint: Endpoint, error: Exception) -> bool:
        """Whether a ready worker stays ready after a poll that failed. Silence may be that of a busy machine, ours or its own: it takes
        several polls to count, more while load reports speak for the worker. A refusal or a broken answer counts at once."""
        if not (isinstance(error, ApiError) and error.code == CODE_WORKER_TIMEOUT):
            endpoint.missed, endpoint.answered = 0, True
            return False
        endpoint.missed += 1
        reports = asyncio.get_running_loop().time() - endpoint.reported_at <= REPORT_LIFE_S
        return endpoint.healthy and endpoint.missed < (MISSES_OF_REPORTING if reports else MISSES)

    async def _ask_load(self, endpoint: Endpoint) -> None:
        """The load of an engine without reports. One that does not tell is as busy as our own picks make it."""
        record = endpoint.record
        assert record is not None
        try:
            endpoint.load = await engine_of(record.engine).load(self._fetch_of(endpoint), record)
        except (ApiError, *UNDECODABLE) as e:
            log.debug("no load", extra={"worker": endpoint.key, "reason": str(e)})
            return
        if endpoint.load is None:
            endpoint.load = PolledLoad()  # asked again, but not soon
        elif not endpoint.removed:
            self.on_polled(endpoint, endpoint.load)

    def _fetch_of(self, endpoint: Endpoint) -> Fetch:
        target = endpoint.target
        headers = key_headers(target.key_env)

        async def ask(path: str, *, port: int = 0) -> tuple[int, bytes]:
            known = headers if not port else []  # the key is the engine's own
            return await fetch(self._pool, target.host, port or target.port, "GET", path, headers=known, timeout_s=ASK_TIMEOUT_S)

        return ask

    def _connect_load(self, endpoint: Endpoint, address: str) -> None:
        if endpoint.load_address == address:
            return
        if endpoint.load_address:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.disconnect(endpoint.load_address)
        endpoint.load_address = address
        if address:
            self._socket.connect(address)

    async def _listen(self) -> None:
        decoder = msgspec.msgpack.Decoder(LoadReport)
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) != 2:
                continue
            try:
                report = decoder.decode(frames[1])
            except UNDECODABLE:
                continue  # a newer writer's report that we cannot read: own picks count instead
            pod_uid = frames[0].removeprefix(b"load@").decode("utf-8", "replace")
            now = asyncio.get_running_loop().time()
            for endpoint in self.endpoints.values():
                record = endpoint.record
                if record is not None and (record.pod_uid, record.incarnation) == (pod_uid, report.incarnation):
                    endpoint.reported_at = now
            self._on_load(pod_uid, report)
