"""Control calls of an operator or router, each answered by one `ControlReply`: flush_cache, pause, continue, log_level, profile, internals.

Most are answered at once; a flush that waits for idle and a profile are answered later, by `poll`, which the loop calls each round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from fleet_contract import errors
from fleet_contract.errors import ApiError
from fleet_contract.launch import RuntimeLaunch
from fleet_contract.names import PAGE_SIZE
from fleet_runtime.cache import pages as owners
from fleet_runtime.messages import Control, ControlReply

if TYPE_CHECKING:
    from fleet_runtime.scheduler.loop import Scheduler

LEVELS: Final = ("debug", "info", "warning", "error")
MOST_STEPS: Final = 100_000
MOST_WAIT_S: Final = 600.0
_PROFILE_S: Final = 60.0


@dataclass(slots=True)
class _Later:
    """A call that is not answered yet. answer: its data, or None while it must wait. overdue: its answer when the time is up."""

    id: str
    until: float
    answer: Callable[[], dict[str, Any] | None]
    overdue: Callable[[], dict[str, Any]]


class Controls:
    """See the module."""

    def __init__(self, scheduler: Scheduler, flags: RuntimeLaunch) -> None:
        self._scheduler = scheduler
        self._flags = flags
        self._later: list[_Later] = []
        self._ops: dict[str, Callable[[Control], dict[str, Any] | None]] = {
            "flush_cache": self._flush_cache,
            "pause": self._pause,
            "continue": self._continue,
            "log_level": self._log_level,
            "profile": self._profile,
            "internals": self._internals,
        }

    def handle(self, call: Control) -> None:
        """Answers a call, now or later."""
        try:
            operation = self._ops.get(call.op)
            if operation is None:
                raise ApiError(400, f"{call.op!r} is no control call; {', '.join(self._ops)} are", code="unknown_operation")
            data = operation(call)
            if data is not None:
                self._reply(call.id, data)
        except ApiError as e:
            self._refuse(call.id, e)

    def poll(self) -> None:
        """Answers what can be answered by now."""
        if not self._later:
            return
        now, waiting = self._scheduler.book.clock(), self._later
        self._later = []
        for call in waiting:
            try:
                data = call.answer()
                if data is None and now >= call.until:
                    data = call.overdue()
            except ApiError as e:
                self._refuse(call.id, e)
                continue
            if data is None:
                self._later.append(call)
            else:
                self._reply(call.id, data)

    def _reply(self, id: str, data: dict[str, Any]) -> None:
        self._scheduler.book.outbox.control_reply(ControlReply(id=id, status=200, data=msgspec.json.encode(data)))

    def _refuse(self, id: str, error: ApiError) -> None:
        data = msgspec.json.encode({"message": error.message, "type": error.type, "code": error.code})
        self._scheduler.book.outbox.control_reply(ControlReply(id=id, status=error.status, data=data))

    def _flush_cache(self, call: Control) -> dict[str, Any] | None:
        wait_s = _number(call, "wait_s", 0.0, least=0.0, most=MOST_WAIT_S)
        if (done := self._flush_if_idle()) is not None:
            return done
        if not wait_s:
            return self._flush_refused()
        self._later.append(_Later(call.id, self._scheduler.book.clock() + wait_s, self._flush_if_idle, self._flush_refused))
        return None

    def _flush_if_idle(self) -> dict[str, Any] | None:
        book = self._scheduler.book
        if book.requests or book.limbo or self._scheduler.outstanding:
            return None
        return {"flushed_tokens": book.memory.flush() * PAGE_SIZE}

    def _flush_refused(self) -> dict[str, Any]:
        book = self._scheduler.book
        raise ApiError(
            409,
            f"the cache cannot be flushed while requests are here ({book.running} run, {book.waiting} wait); try again when they have ended, "
            "or give wait_s",
            code="busy",
        )

    def _pause(self, call: Control) -> dict[str, Any]:
        self._scheduler.paused = True
        return {"paused": True}

    def _continue(self, call: Control) -> dict[str, Any]:
        self._scheduler.paused = False
        return {"paused": False}

    def _log_level(self, call: Control) -> dict[str, Any]:
        level = call.args.get("level")
        if level not in LEVELS:
            raise ApiError(400, f"level is {level!r}; {', '.join(LEVELS)} are allowed", code="invalid_value", param="level")
        logging.getLogger().setLevel(str(level).upper())
        return {"level": level}

    def _profile(self, call: Control) -> dict[str, Any] | None:
        steps = int(_number(call, "steps", 100, least=1, most=MOST_STEPS))
        wait_s = _number(call, "timeout_s", _PROFILE_S, least=0.0, most=MOST_WAIT_S)
        stages, totals = self._scheduler.stages, self._scheduler.book.totals
        if stages.profiling:
            raise ApiError(409, "a profile is being taken; try again when it is done", type=errors.INVALID_REQUEST, code="busy")
        first = totals.steps
        stages.start_profile()

        def result() -> dict[str, Any]:
            done = totals.steps - first
            return {"steps": done, "stages": stages.stop_profile(done)}

        self._later.append(
            _Later(call.id, self._scheduler.book.clock() + wait_s, lambda: result() if totals.steps - first >= steps else None, result)
        )
        return None

    def _internals(self, call: Control) -> dict[str, Any]:
        book, flags = self._scheduler.book, self._flags
        pages = book.memory.pages
        return {
            "paused": self._scheduler.paused,
            "draining": self._scheduler.draining,
            "schedule_policy": flags.schedule_policy,
            "eviction_policy": flags.eviction_policy,
            "overlap": flags.overlap,
            "new_token_ratio": round(book.ratio.value, 4),
            "retractions": book.totals.retractions,
            "outstanding_steps": self._scheduler.outstanding,
            "running": book.running,
            "waiting": book.waiting,
            "waiting_tokens": book.waiting_tokens,
            "compiling": book.grammars.waiting,
            "queues": {
                "plain": len(book.plain_queue),
                "prefill_legs": len(book.prefill_queue),
                "decode_legs": len(book.decode_queue),
                "prefilling": len(book.prefilling),
                "decoding": len(book.decoding),
                "limbo": len(book.limbo),
            },
            "pages": {
                "total": pages.num_pages,
                "free": pages.count(owners.FREE),
                "tree": pages.count(owners.TREE),
                "request": pages.count(owners.REQUEST),
                "promised": book.memory.promised,
                "evictable": book.memory.tree.evictable,
            },
            "steps": book.totals.steps,
            "scheduler_us_per_step": round(self._scheduler.stages.busy_ns / 1e3 / max(1, book.totals.steps), 1),
            "self_check_failures": book.totals.self_check_failures,
        }


def _number(call: Control, name: str, default: float, *, least: float, most: float) -> float:
    value = call.args.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ApiError(400, f"{name} is {value!r}; a number from {least:g} to {most:g} is allowed", code="invalid_value", param=name)
    return float(value)
