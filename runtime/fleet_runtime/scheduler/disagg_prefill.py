"""Prefill legs: from their arrival until decode has confirmed the pages. Protocol: docs/contract.md section 9.

A leg holds nothing until decode has said where its pages go (bootstrapping). Then it is computed like any prompt, its pages leave after
each chunk, and it holds them until decode has received everything. They stay in the prefix tree.
"""

from __future__ import annotations

from fleet_contract import errors
from fleet_contract.errors import ApiError
from fleet_contract.handoff import Done
from fleet_contract.names import PAGE_SIZE
from fleet_runtime.cache.memory import pages_for
from fleet_runtime.messages import TokenLogprob
from fleet_runtime.scheduler.book import Book
from fleet_runtime.scheduler.logprobs import encode_logprobs
from fleet_runtime.scheduler.request import Request, State
from fleet_runtime.transfer.base import KvTransfer, PrefillAllocated, PrefillClosed, PrefillFailed, PrefillReceived

PrefillEvent = PrefillAllocated | PrefillReceived | PrefillFailed | PrefillClosed


class PrefillLegs:
    """See the module. Called by the scheduler loop."""

    def __init__(self, book: Book, transfer: KvTransfer) -> None:
        self._book = book
        self._transfer = transfer
        self._by_room: dict[int, Request] = {}  # until the room's final event

    def start(self, request: Request) -> None:
        """A prefill leg has arrived."""
        room = request.admit.room
        if room in self._by_room:
            self._book.fail(request, ApiError(409, f"room {room} is in use; the router mints a new room for each pair", code="room_in_use"))
            return
        self._by_room[room] = request
        self._book.place(request, State.BOOTSTRAPPING)
        request.room_open = True
        self._transfer.expect(room)

    def request_of(self, event: PrefillEvent) -> Request | None:
        """The leg that an event speaks of; it may have ended."""
        return self._by_room.get(event.room)

    def on_event(self, request: Request, event: PrefillEvent) -> None:
        """Acts on what the transfer says of a leg's room."""
        match event:
            case PrefillAllocated():
                if request.state is State.BOOTSTRAPPING:
                    self._allocated(request, event)
            case PrefillFailed():
                self._book.fail(request, event.error)
            case PrefillReceived():
                self._closed(request)
                if request.state is State.TRANSFERRING:
                    self._book.hand_over(request)
            case PrefillClosed():
                self._closed(request)
                self._book.fail(request, ApiError(503, "the hand-over ended early", type=errors.SERVER, code=errors.CODE_PEER_FAILED))

    def _closed(self, request: Request) -> None:
        del self._by_room[request.admit.room]
        request.room_open = False
        self._book.settle(request)

    def _allocated(self, request: Request, event: PrefillAllocated) -> None:
        total = pages_for(request.prompt_tokens)
        if not 0 <= event.prefix_pages <= request.prefix_limit or event.prefix_pages + event.pages != total:
            message = (
                f"decode reserved {event.pages} pages behind a prefix of {event.prefix_pages}, but the prompt of {request.prompt_tokens} tokens "
                f"has {total} pages; the two legs of room {event.room} carry different prompts"
            )
            self._book.fail(request, ApiError(500, message, type=errors.SERVER, code="room_mismatch"))
            return
        request.decode_prefix = request.sent_pages = event.prefix_pages
        self._book.place(request, State.WAITING)

    def send_computed(self, request: Request) -> None:
        """Sends the pages that became whole with the last chunk; with the prompt's end also the partial last page."""
        assert request.lease is not None
        done = request.computed >= request.prompt_tokens
        end = pages_for(request.prompt_tokens) if done else request.computed // PAGE_SIZE
        if end > request.sent_pages:
            pages = [int(p) for p in request.lease.table[request.sent_pages : end]]
            self._transfer.send_pages(request.admit.room, request.sent_pages - request.decode_prefix, pages)
            request.sent_pages = end

    def finish(self, request: Request, first_token: int, logprob: TokenLogprob | None) -> None:
        """The prompt is computed and its first token sampled: all that decode needs goes out."""
        self._book.place(request, State.TRANSFERRING)
        self._transfer.send_done(
            request.admit.room,
            Done(
                first_token=first_token,
                seed=request.seed,
                cached_tokens=request.cached_tokens,
                prompt_tokens=request.prompt_tokens,
                logprobs=encode_logprobs(logprob, request.prompt_logprobs),
            ),
        )
