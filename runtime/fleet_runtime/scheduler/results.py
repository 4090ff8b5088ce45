"""What a step's results mean for its requests: tokens, ends, cached pages, logprobs, embeddings. Called by the loop when a step has landed.

A request may have ended while its step was computed (a stop id before, a stop string, an abort). What the step drew for it is thrown away.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fleet_contract import errors
from fleet_contract.errors import ApiError
from fleet_runtime.engine.base import StepOutput, TopLogprobs
from fleet_runtime.messages import TokenLogprob
from fleet_runtime.scheduler.batch import StepRow
from fleet_runtime.scheduler.book import Book
from fleet_runtime.scheduler.disagg_prefill import PrefillLegs
from fleet_runtime.scheduler.logprobs import token_logprobs
from fleet_runtime.scheduler.request import Kind, Request, State


class Results:
    """See the module."""

    def __init__(self, book: Book, prefill_legs: PrefillLegs | None) -> None:
        self._book = book
        self._prefill_legs = prefill_legs

    def take(self, rows: Sequence[StepRow], output: StepOutput) -> None:
        """The results of one step, row by row."""
        totals = self._book.totals
        totals.steps += 1
        failed, tokens = output.failed.tolist(), output.tokens.tolist()
        for i, row in enumerate(rows):
            request = row.request
            if request.state is State.ENDED:
                totals.wasted_tokens += row.place >= 0
                continue
            if row.prefill:
                totals.prefilled_tokens += row.count
            else:
                totals.decode_tokens += row.count
            try:
                if failed[i]:  # before the tree or another worker gets any page of this step
                    raise ApiError(500, "the model's output for this request is not a finite number", type=errors.SERVER, code="numeric_error")
                if request.state is State.DECODING and request.admit.logprobs < 0:  # what most rows are
                    request.computed += 1
                    request.drawing -= 1
                    self.accept(request, tokens[i])
                else:
                    self._row(row, i, tokens[i], output)
            except Exception as e:  # the border of one request
                self._book.blame(request, e)

    def _row(self, row: StepRow, i: int, token: int, output: StepOutput) -> None:
        request = row.request
        request.computed += row.count
        if row.prefill:
            self._prompt_part(row, i, output)
            self.commit(request)
            if request.kind is Kind.PREFILL:
                assert self._prefill_legs is not None
                self._prefill_legs.send_computed(request)
            if request.admit.embed and request.computed == request.prompt_tokens:
                self._book.embed(request, self._vector(request))
                return
        if row.place < 0:
            return
        request.drawing -= 1
        logprob = token_logprobs([token], _wanted(output.logprobs, i))[0] if request.admit.logprobs >= 0 else None
        if request.kind is Kind.PREFILL:
            assert self._prefill_legs is not None
            self._prefill_legs.finish(request, token, logprob)
            return
        if request.state is State.PREFILLING:
            self._book.place(request, State.DECODING)
        self.accept(request, token, logprob)

    def _prompt_part(self, row: StepRow, i: int, output: StepOutput) -> None:
        """What is wanted of the prompt's own tokens."""
        request = row.request
        if request.prompt_logprobs is not None:
            nexts = request.ids[row.begin + 1 : min(row.begin + row.count + 1, request.prompt_tokens)].tolist()
            if nexts:
                request.prompt_logprobs += token_logprobs(nexts, _wanted(output.prompt_logprobs, i))
        if request.admit.embed and (pooled := output.pooled.get(i)) is not None:
            request.pooled = pooled.astype(np.float64) + (0.0 if request.pooled is None else request.pooled)

    @staticmethod
    def _vector(request: Request) -> bytes:
        if request.pooled is None:
            raise ApiError(400, "this executor gives no embeddings", code="no_embeddings")
        scale = 1.0 / request.prompt_tokens if request.admit.embed == "mean" else 1.0
        return (request.pooled * scale).astype("<f4").tobytes()

    def accept(self, request: Request, token: int, logprob: TokenLogprob | None = None) -> None:
        """A new token of the answer, and whether it is the last. A stop id comes before the length, that before the end of a grammar."""
        admit, done = request.admit, request.length - request.prompt_tokens
        stops = token in request.stop_ids and done >= admit.min_tokens
        request.ids[request.length] = token
        request.length += 1
        if request.counts is not None:
            request.counts.add(token)
        finish = None
        if stops:
            finish = "stop"
        else:
            complete = request.grammar is not None and request.grammar.accept(token)
            if done + 1 >= admit.max_new:
                finish = "length"
            elif complete:
                finish = "stop"
        if finish is not None:
            self.commit(request)
        if stops:
            self._book.emit(request, [], finish, stop_id=token)
        else:
            self._book.emit(request, [token], finish, logprobs=None if logprob is None else [logprob])

    def commit(self, request: Request) -> None:
        """The prefix cache takes the whole pages of what is computed."""
        if request.lease is not None and request.computed:
            self._book.memory.commit(request.lease, request.page_key(request.computed))


def _wanted(values: dict[int, TopLogprobs], row: int) -> TopLogprobs:
    try:
        return values[row]
    except KeyError:
        raise ApiError(400, "this executor gives no logprobs; ask without them, or choose another --executor", code="no_logprobs") from None
