"""Control calls of the internal port: each is one `Control` to the scheduler and its `ControlReply`, or a sentence that says why there is none."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt

from fleet_contract.errors import OVERLOADED, SERVER, TIMEOUT, ApiError
from fleet_contract.openai import Within
from fleet_runtime import messages as m
from fleet_runtime.server.manager import Channel

CONTROL_TIMEOUT_S: Final = 10.0  # beyond the time that a call itself may wait


class Nothing(BaseModel):
    """No arguments."""

    model_config = ConfigDict(extra="forbid")


class FlushCache(BaseModel):
    """Body of `POST /flush_cache`: forgets all cached prefixes. 409 while requests are here, unless they end within `wait_s` seconds."""

    model_config = ConfigDict(extra="forbid")
    wait_s: Annotated[float, Within(0, 600)] = 0.0


class LogLevel(BaseModel):
    """Body of `POST /log_level`: of http and scheduler, until they end."""

    model_config = ConfigDict(extra="forbid")
    level: Literal["debug", "info", "warning", "error"]


class Profile(BaseModel):
    """Body of `POST /profile`: where the time of the next `steps` steps goes, or of those that come within `timeout_s` seconds."""

    model_config = ConfigDict(extra="forbid")
    steps: StrictInt = Field(default=100, ge=1, le=100_000)
    timeout_s: Annotated[float, Within(0, 600)] = 60.0


# Path -> (op of the message, model of its arguments).
CONTROL_CALLS: Final[dict[str, tuple[str, type[BaseModel]]]] = {
    "/flush_cache": ("flush_cache", FlushCache),
    "/pause": ("pause", Nothing),  # nothing is computed until /continue; what runs stands still
    "/continue": ("continue", Nothing),
    "/log_level": ("log_level", LogLevel),
    "/profile": ("profile", Profile),
}


class Controls:
    """The calls under way. One event loop; no locks."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._waiting: dict[str, asyncio.Future[m.ControlReply]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    async def call(self, op: str, args: Mapping[str, Any]) -> bytes:
        """The reply's JSON. Raises ApiError: the scheduler's own refusal, 503 when there is none or it died, 504 when it does not answer."""
        call_id = os.urandom(8).hex()
        timeout_s = CONTROL_TIMEOUT_S + float(args.get("wait_s") or args.get("timeout_s") or 0.0)
        future: asyncio.Future[m.ControlReply] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = future
        try:
            if not self._channel.send(m.SCHEDULER, m.Control(id=call_id, op=op, args=dict(args))):
                raise ApiError(503, "the scheduler is not there; try again", type=OVERLOADED, code="scheduler_unreachable", retry_after_s=1)
            async with asyncio.timeout(timeout_s):
                reply = await future
        except TimeoutError:
            message = f"the scheduler did not answer {op} within {timeout_s:g} s; it may still do it"
            raise ApiError(504, message, type=TIMEOUT, code="control_timeout") from None
        finally:
            del self._waiting[call_id]
        if reply.status != 200:
            raise ApiError.from_body(reply.status, b'{"error":' + reply.data + b"}")
        return reply.data

    def on_reply(self, reply: m.ControlReply) -> bool:
        """A reply came; False when nobody waits for it any more."""
        future = self._waiting.get(reply.id)
        if future is None or future.done():
            return False
        future.set_result(reply)
        return True

    def on_death(self, cause: str) -> None:
        """The scheduler or the detokenizer died: no reply will come."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ApiError(503, cause, type=SERVER, code="worker_process_died", retry_after_s=1))
