"""Prefill and decode schedulers in this process, joined by real TCP on loopback; one thread turns both loops, so every state can be held."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from fleet_contract.handoff import Hello
from fleet_contract.launch import RuntimeLaunch
from fleet_contract.worker import Profile
from fleet_runtime.engine.base import Executor
from fleet_runtime.engine.simulated import SimulatedExecutor
from fleet_runtime.scheduler.request import State
from fleet_runtime.transfer.link import Settings
from fleet_runtime.transfer.tcp import TcpTransfer
from fleet_testing.fake_engine import FakeEngine
from fleet_testing.scheduler_harness import Answer, VirtualScheduler, byte_compiler, flags_of

# For a test of what waits for ticks. All others keep the product's times: two live workers share this process's interpreter lock, and on a busy
# machine one of them may well say nothing for three ticks of a tenth of a second.
TICK_S: Final = 0.25
QUICK: Final[dict[str, object]] = {"tick_s": TICK_S, "other_leg_s": 1.0}


class RealClockScheduler(VirtualScheduler):
    """One worker with a real transfer; its steps take no time. fake: over the fake engine, with grammars."""

    def __init__(
        self, flags: RuntimeLaunch, *, incarnation: str, pages: int, model_revision: str = "r", fake: bool = False, **settings: object
    ) -> None:
        executor: Executor = FakeEngine(pages) if fake else SimulatedExecutor(num_pages=pages, profile=Profile(), sleep=lambda s: None)  # type: ignore[assignment]
        layout = executor.layout
        hello = Hello(
            incarnation=incarnation,
            pod_uid=f"pod-{flags.role}",
            model_revision=model_revision,
            page_bytes=layout.page_bytes,
            dtype=layout.dtype,
            layers=layout.layers,
            kv_heads=layout.kv_heads,
            head_dim=layout.head_dim,
            layout=layout.layout,
        )
        given = Settings(**{"hold": flags.transfer_hold, **settings})  # type: ignore[arg-type]
        self.transfer = TcpTransfer(hello, executor, given, listen=flags.role != "decode")
        self.transfer.start()
        self.incarnation = incarnation
        more = {"compile": byte_compiler(), "spawn": lambda job: job()} if fake else {}
        super().__init__(flags, executor=executor, transfer=self.transfer, clock=time.monotonic, **more)  # type: ignore[arg-type]

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.transfer.bootstrap_port}"

    def state(self, rid: str) -> State | None:
        request = self.book.requests.get((rid, 0))
        return request.state if request is not None else None

    def idle(self) -> bool:
        """Nothing is held, not even in limbo."""
        return not self.book.requests and not self.book.limbo and self.scheduler.counters()["pages_request"] == 0


def turn_once(*workers: RealClockScheduler) -> None:
    """Turns the loop of each, and lets their I/O threads run if none had work: a loop that only spins keeps the interpreter's lock from them."""
    busy = [worker.scheduler.iterate() for worker in workers]
    if not any(busy):
        time.sleep(0.001)


class Pair:
    """A prefill and a decode worker."""

    def __init__(self, prefill: RealClockScheduler, decode: RealClockScheduler) -> None:
        self.prefill, self.decode = prefill, decode
        self._rooms = 0

    def ask(self, rid: str, ids: list[int], max_new: int = 8, *, room: int = 0, legs: str = "pd", **fields: object) -> tuple[Answer, Answer]:
        """Sends both legs (or those named); returns their answers."""
        self._rooms += 1
        room = room or self._rooms
        if "p" in legs:
            self.prefill.admit(rid, ids, max_new, leg="prefill", room=room, **fields)
        if "d" in legs:
            fields = {"bootstrap": self.prefill.bootstrap, "prefill_incarnation": self.prefill.incarnation, **fields}
            self.decode.admit(rid, ids, max_new, leg="decode", room=room, **fields)
        return self.prefill.inbox.of(rid), self.decode.inbox.of(rid)

    def turn(self, until: Callable[[], object], what: str, timeout_s: float = 10.0, *, prefill: bool = True, decode: bool = True) -> None:
        """Turns the loops (or one of them) until a condition holds."""
        turning = [worker for worker, turns in ((self.prefill, prefill), (self.decode, decode)) if turns]
        end = time.monotonic() + timeout_s
        while not until():
            assert time.monotonic() < end, f"after {timeout_s} s still not: {what}"
            turn_once(*turning)

    def turn_to_end(self, *answers: Answer) -> None:
        self.turn(lambda: all(a.end is not None for a in answers), f"all end: {answers}")

    def turn_to_idle(self) -> None:
        self.turn(lambda: self.prefill.idle() and self.decode.idle(), "nothing is held on either side")


class Workers:
    """Makes workers, and closes their transfers at the end."""

    def __init__(self) -> None:
        self._made: list[RealClockScheduler] = []

    def __call__(
        self, role: str, incarnation: str = "", *, pages: int = 128, flags: dict[str, object] | None = None, **settings: object
    ) -> RealClockScheduler:
        worker = RealClockScheduler(
            flags_of(**{"pages": pages, "role": role, **(flags or {})}),  # type: ignore[arg-type]
            pages=pages,
            incarnation=incarnation or f"{len(self._made):016x}",
            **settings,  # type: ignore[arg-type]
        )
        self._made.append(worker)
        return worker

    def close(self) -> None:
        for worker in self._made:
            worker.transfer.close()
