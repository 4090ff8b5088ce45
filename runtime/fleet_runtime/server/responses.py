"""Answers that wait for the scheduler: plain, streamed, and that of a prefill leg. Each is an ASGI callable that owns its request's end.

No status line goes out before the first token, so whatever fails before it has its own status. The client's leaving is seen by `receive`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fleet_contract.errors import TIMEOUT, ApiError
from fleet_contract.logs import facts
from fleet_contract.worker import PrefillAnswer
from fleet_runtime import messages as m
from fleet_runtime.server.answer import Piece, Usage
from fleet_runtime.server.embeddings import WAVE, EmbeddingJob, embed_admits, embedding_answer
from fleet_runtime.server.manager import Item, ReqState
from fleet_runtime.server.metrics import endpoint_of
from fleet_runtime.server.requests import Generation
from fleet_runtime.server.state import HttpState
from fleet_runtime.server.traces import Stages, carrier_of

log = logging.getLogger(__name__)

JSON_TYPE: Final = "application/json"
_GRACE_S: Final = 2.0  # the scheduler keeps deadlines; this is for when it cannot


class _Gone(Exception):
    """The client left."""


class AdmittedResponse(Response):
    """Runs an opened request to its end and answers it. Releases the state, whatever happens. Subclasses say how."""

    def __init__(self, state: HttpState, request: ReqState) -> None:
        super().__init__(media_type=JSON_TYPE)
        self._state = state
        self._request = request
        self._first_at: float | None = None
        self._queued_s = self._prefill_s = 0.0  # of its first choice
        self._started = False  # the status line is out
        self._gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        status = 200
        try:
            await self._run(send)
        except _Gone:
            status = 499
            self._state.metrics.disconnects += 1
        except ApiError as e:
            status = e.status
            await self._fail(e, scope, send)
        finally:
            watcher.cancel()
            self._state.manager.cancel(self._request, "its handler ended")
            self._state.manager.release(self._request)
            self._count(status, scope)

    async def _run(self, send: Send) -> None:
        """Admits, waits, answers. Raises ApiError, _Gone."""
        raise NotImplementedError

    def _usage(self) -> Usage:
        """What was used, by now."""
        raise NotImplementedError

    def _error_event(self, error: ApiError, request_id: str) -> bytes:
        """An error inside a stream."""
        raise NotImplementedError

    async def _watch(self, receive: Receive) -> None:
        """Ends the request when the client leaves."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._state.manager.cancel(self._request, "the client closed the connection")
        self._request.event.set()

    async def _items(self) -> list[Item]:
        """The next items. Raises ApiError for whatever ends the request early, _Gone when nobody reads any more."""
        items = await self._state.manager.wait(self._request, self._until())
        if self._gone:
            raise _Gone
        for item in items:
            if isinstance(item, ApiError):
                raise item
            if isinstance(item, m.Failed) and item.index not in self._request.complete:
                retry_s = 1 if item.status in (429, 503) else None
                raise ApiError(item.status, item.message, type=item.type, code=item.code, retry_after_s=retry_s)
        if items and self._first_at is None:
            self._first_at = time.monotonic()
            self._state.metrics.first_token.observe(self._first_at - self._request.started_at)
            if isinstance(first := items[0], m.Text):
                self._queued_s, self._prefill_s = first.queued_s, first.prefill_s
                self._state.metrics.queued.observe(first.queued_s)
                self._state.metrics.prefill.observe(first.prefill_s)
        if not items and time.monotonic() >= self._until():
            raise self._timed_out()
        return items

    def _until(self) -> float:
        started, routed = self._request.started_at, self._request.routed
        until = started + self._state.flags.request_timeout
        if self._first_at is None and routed.deadline_ms is not None:
            until = min(until, started + routed.deadline_ms / 1000 + _GRACE_S)
        return until

    def _timed_out(self) -> ApiError:
        limit = self._state.flags.request_timeout
        if time.monotonic() - self._request.started_at >= limit:
            return ApiError(504, f"the request took more than {limit} s (--request-timeout)", type=TIMEOUT, code="request_timeout")
        return ApiError(504, f"no token came within {self._request.routed.deadline_ms} ms", type=TIMEOUT, code="deadline_exceeded")

    async def _fail(self, error: ApiError, scope: Scope, send: Send) -> None:
        """An error as the answer, or as the last event of a stream that has begun. The body ends as its framing says, so the connection serves on."""
        if not self._request.admitted:
            self._state.manager.reject(self._request, error)
        level = logging.WARNING if error.status in (500, 504) else logging.DEBUG
        log.log(
            level, "request failed", extra=facts(rid=self._request.rid, status=error.status, code=error.code, request_id=scope["state"]["request_id"])
        )
        if not self._started:
            raise error  # the application's border answers it
        await send({"type": "http.response.body", "body": self._error_event(error, scope["state"]["request_id"]), "more_body": False})

    async def _send_whole(self, status: int, body: bytes, send: Send) -> None:
        headers = [(b"content-type", JSON_TYPE.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def _count(self, status: int, scope: Scope) -> None:
        metrics, usage = self._state.metrics, self._usage()
        stages = self._stages(status, usage, scope)
        metrics.duration.observe(stages.ended - stages.started)
        log.debug("request ended", extra=facts(rid=self._request.rid, **stages.facts()))
        if self._state.traces is not None:
            self._state.traces.record(stages, carrier_of(scope))
        metrics.prompt_tokens += usage.prompt
        metrics.completion_tokens += usage.completion
        if status == 499 or self._started:
            scope["state"]["counted_status"] = status

    def _stages(self, status: int, usage: Usage, scope: Scope) -> Stages:
        return Stages(
            endpoint=endpoint_of(scope),
            started=self._request.started_at,
            admitted=self._request.admitted_at,
            first_token=self._first_at or 0.0,
            ended=time.monotonic(),
            queued_s=self._queued_s,
            prefill_s=self._prefill_s,
            status=status,
            request_id=scope["state"]["request_id"],
            model=self._state.config.served_names[0],
            prompt_tokens=usage.prompt,
            cached_tokens=usage.cached,
            completion_tokens=usage.completion,
        )


class GenerationResponse(AdmittedResponse):
    """Plain, streamed, or that of a prefill leg."""

    def __init__(self, state: HttpState, request: ReqState, generation: Generation) -> None:
        super().__init__(state, request)
        self._generation = generation

    async def _run(self, send: Send) -> None:
        self._state.manager.admit(self._request, self._generation.choices)
        if self._request.routed.leg == "prefill":
            await self._prefill(send)
        elif self._generation.stream:
            await self._stream(send)
        else:
            await self._plain(send)

    def _usage(self) -> Usage:
        return self._generation.shape.answer.usage()

    def _error_event(self, error: ApiError, request_id: str) -> bytes:
        return self._generation.shape.error(error, request_id)

    async def _plain(self, send: Send) -> None:
        answer = self._generation.shape.answer
        while not answer.done:
            for item in await self._items():
                self._add(item)
        await self._send_whole(200, self._generation.shape.plain(), send)

    async def _stream(self, send: Send) -> None:
        shape = self._generation.shape
        while not shape.answer.done:
            data = b""
            for item in await self._items():
                if (piece := self._add(item)) is not None:
                    data += shape.chunks(piece)
            if not self._started and self._first_at is not None:
                self._started = True
                headers = [(b"content-type", shape.stream_type.encode()), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": shape.ending(), "more_body": False})

    def _add(self, item: Item) -> Piece | None:
        """New text of a choice that has not ended; a choice that ends here, by its parser, ends at the scheduler too."""
        answer = self._generation.shape.answer
        if not isinstance(item, m.Text) or answer.results[item.index].finish is not None:
            return None
        piece = answer.add(item)
        if piece.finish is not None and item.finish is None:
            self._state.manager.complete(self._request, item.index)
        return piece

    async def _prefill(self, send: Send) -> None:
        """A prefill leg: one `HandedOver` per choice."""
        results = self._generation.shape.answer.results
        done: set[int] = set()
        while len(done) < len(results):
            for item in await self._items():
                if isinstance(item, m.HandedOver):
                    done.add(item.index)
                    results[item.index].cached_tokens = item.cached_tokens
                    results[item.index].prompt_tokens = item.prompt_tokens
                elif isinstance(item, m.Text) and item.finish is not None:
                    raise ApiError(500, "the scheduler ran a prefill leg as a whole request", type="server_error", code="internal")
        usage = self._generation.shape.answer.usage()
        answer = PrefillAnswer(self._request.rid, usage.cached, usage.prompt)
        await self._send_whole(200, msgspec.json.encode(answer), send)


class EmbeddingResponse(AdmittedResponse):
    """One vector per input; a few inputs are with the scheduler at once."""

    def __init__(
        self,
        state: HttpState,
        request: ReqState,
        job: EmbeddingJob,
        write: Callable[[EmbeddingJob, list[m.Embedded]], bytes] = embedding_answer,
    ) -> None:
        """Args: write: the answer's body in the request's dialect."""
        super().__init__(state, request)
        self._job = job
        self._write = write
        self._vectors: dict[int, m.Embedded] = {}

    async def _run(self, send: Send) -> None:
        request = self._request
        waiting = embed_admits(self._job, request.rid, request.routed, request.started_at)
        total, at = len(waiting), min(WAVE, len(waiting))
        self._state.manager.admit(request, waiting[:at])
        while len(self._vectors) < total:
            new = [item for item in await self._items() if isinstance(item, m.Embedded)]
            self._vectors.update((item.index, item) for item in new)
            self._state.manager.admit(request, waiting[at : at + len(new)])
            at += len(new)
        await self._send_whole(200, self._write(self._job, [self._vectors[i] for i in range(total)]), send)

    def _usage(self) -> Usage:
        done = self._vectors.values()
        return Usage(prompt=sum(e.prompt_tokens for e in done), cached=sum(e.cached_tokens for e in done))
