"""Decode legs: from their arrival until their prompt's pages are here, written by a prefill worker. Protocol: docs/contract.md section 9.

A decode leg never computes its prompt: it is connecting, then waits for a row and pages, then receives, then decodes like any request. If
the hand-over fails, the request fails.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from fleet_contract import errors
from fleet_contract.errors import ApiError
from fleet_contract.names import PAGE_SIZE
from fleet_runtime.cache.memory import pages_for
from fleet_runtime.messages import TokenLogprob
from fleet_runtime.scheduler.book import Book
from fleet_runtime.scheduler.logprobs import decode_logprobs
from fleet_runtime.scheduler.request import Request, State
from fleet_runtime.transfer.base import DecodeClosed, DecodeComplete, DecodeFailed, DecodeOpen, KvTransfer

DecodeEvent = DecodeOpen | DecodeComplete | DecodeFailed | DecodeClosed


class DecodeLegs:
    """See the module. Called by the scheduler loop; `first_token` is the loop's handling of a sampled token."""

    def __init__(self, book: Book, transfer: KvTransfer, first_token: Callable[[Request, int, TokenLogprob | None], None]) -> None:
        self._book = book
        self._transfer = transfer
        self._first_token = first_token
        self._generations = itertools.count(1)
        self._by_generation: dict[int, Request] = {}  # until the room's final event

    def start(self, request: Request) -> None:
        """A decode leg has arrived."""
        request.generation = next(self._generations)
        self._by_generation[request.generation] = request
        self._book.place(request, State.CONNECTING)
        request.room_open = True
        self._transfer.dial(request.generation, request.admit.room, request.admit.bootstrap, request.admit.prefill_incarnation)

    def request_of(self, event: DecodeEvent) -> Request | None:
        """The leg that an event speaks of; it may have ended."""
        return self._by_generation.get(event.generation)

    def on_event(self, request: Request, event: DecodeEvent) -> None:
        """Acts on what the transfer says of a leg's room."""
        match event:
            case DecodeOpen():
                if request.state is State.CONNECTING:
                    self._book.place(request, State.PREALLOC)
            case DecodeFailed():
                self._book.fail(request, event.error)
            case DecodeComplete():
                self._closed(request)
                if request.state is State.RECEIVING:
                    self._received(request, event)
            case DecodeClosed():
                self._closed(request)
                self._book.fail(request, ApiError(503, "the hand-over ended early", type=errors.SERVER, code=errors.CODE_PEER_FAILED))

    def _closed(self, request: Request) -> None:
        del self._by_generation[request.generation]
        request.room_open = False
        self._book.settle(request)

    def reserve(self) -> None:
        """Gives the first in the queue their rows and pages, as far as these go, and tells their prefill workers.

        Each room of a request is reserved for alone and whole, prompt and answer, and never waits for another room of the same request;
        so two requests cannot hold halves and wait for each other.
        """
        while self._book.decode_queue and self._book.try_lease(request := self._book.decode_queue[0]):
            lease = request.lease
            assert lease is not None
            prompt_pages = pages_for(request.prompt_tokens)
            self._book.place(request, State.RECEIVING)
            grown = self._book.memory.grow(lease, prompt_pages)
            assert grown, "pages that were promised just now are there"
            self._transfer.alloc(request.generation, lease.shared, lease.own_pages(), request.prompt_tokens)

    def _received(self, request: Request, event: DecodeComplete) -> None:
        lease, done = request.lease, event.done
        assert lease is not None
        if done.prompt_tokens != request.prompt_tokens:
            message = f"prefill computed a prompt of {done.prompt_tokens} tokens, but ours has {request.prompt_tokens}: the two legs differ"
            self._book.fail(request, ApiError(500, message, type=errors.SERVER, code="room_mismatch"))
            return
        self._book.totals.received_tokens += request.prompt_tokens - lease.shared * PAGE_SIZE
        request.computed = request.launched = request.prompt_tokens
        request.cached_tokens = done.cached_tokens
        request.seed = done.seed
        self._book.memory.commit(lease, request.page_key(request.prompt_tokens))
        self._book.place(request, State.DECODING)
        logprob, request.prompt_logprobs = decode_logprobs(done.logprobs)
        self._first_token(request, done.first_token, logprob)
