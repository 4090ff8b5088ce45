"""An engine for tests: its tokens are a plain function of the context *as its pages hold it*, so the right answer is known without an engine.

`next_token` is that function; `expected` follows it. Every step reads each row's whole context back from the pages, so a lost, stale or
misplaced page changes the answer. Rows with options draw from logits that are made of the same hash, with the whole of `Sampling` applied.
It takes no time but that of a virtual clock.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from fleet_contract.names import PAGE_SIZE
from fleet_contract.worker import Profile
from fleet_runtime.engine.base import (
    NEVER_DRAWN,
    POOL_LAST,
    POOL_NONE,
    KvLayout,
    Sampling,
    StepInput,
    StepOutput,
    TopLogprobs,
)

VOCAB = 260
HIDDEN = 4
POISON = -7
F32 = npt.NDArray[np.float32]


def _hash(context: npt.NDArray[np.int32]) -> int:
    return zlib.crc32(context)  # type: ignore[arg-type]


def next_token(context: npt.NDArray[np.int32]) -> int:
    """The greedy token after a context, without options."""
    return _hash(context) % VOCAB


def logits_of(context: npt.NDArray[np.int32]) -> F32:
    """[VOCAB]; `next_token` is the highest."""
    state = (np.arange(VOCAB, dtype=np.uint64) + np.uint64(_hash(context))) * np.uint64(0x9E3779B97F4A7C15)
    logits = ((state >> np.uint64(40)) % np.uint64(1000)).astype(np.float32) / 500
    logits[next_token(context)] = 3.0
    return logits


def expected(prompt: Sequence[int], count: int, stop: Sequence[int] = ()) -> list[int]:
    """The greedy answer of so many tokens, without the stop id that ends it."""
    ids, start = np.array([*prompt, *[0] * count], dtype=np.int32), len(prompt)
    for at in range(start, start + count):
        ids[at] = next_token(ids[:at])
        if ids[at] in stop:
            return list(ids[start:at].tolist())
    return list(ids[start:].tolist())


def hidden_of(token: int, position: int) -> F32:
    """The hidden state of one token."""
    return np.array([token, position, token * position % 17, 1], dtype=np.float32)


def plain_rows(sampling: Sampling) -> list[bool]:
    """Rows without options: their token is `next_token`."""
    out: list[bool] = (sampling.temperature == 0).tolist()
    for starts in (sampling.bias_starts, sampling.count_starts):
        if starts is not None:
            out = [plain and not size for plain, size in zip(out, np.diff(starts).tolist(), strict=True)]
    for wanted in (sampling.mask_rows, sampling.logprobs):
        if wanted is not None:
            out = [plain and n < 0 for plain, n in zip(out, wanted.tolist(), strict=True)]
    return out


class FakeEngine:
    """See the module. `tick` gets the seconds that a step takes."""

    def __init__(self, num_pages: int, *, slots: int = 64, tick: Callable[[float], None] = lambda s: None) -> None:
        self._pool = np.zeros((num_pages, PAGE_SIZE), dtype=np.int32)
        self._relay = [NEVER_DRAWN] * slots
        self._tick = tick
        self._layout = KvLayout(
            page_size=PAGE_SIZE, num_pages=num_pages, page_bytes=64, layers=1, kv_heads=1, head_dim=16, dtype="int32", layout="fake"
        )
        self._batch: StepInput | None = None
        self._contexts: list[npt.NDArray[np.int32]] = []
        self.failing: Callable[[StepInput], npt.NDArray[np.bool_]] | None = None
        self.steps = 0
        self.hidden_size = HIDDEN
        self.late_samples = 0  # draws that came by `sample`

    layout = property(lambda self: self._layout)
    vocab_size = VOCAB
    profile = Profile()
    slots = property(lambda self: len(self._relay))

    def step(self, batch: StepInput, sampling: Sampling) -> StepOutput:
        self.forward(batch)
        self.late_samples -= 1
        return self.sample(sampling)

    def forward(self, batch: StepInput) -> None:
        assert self._batch is None, "a forward without its sample"
        self.steps += 1
        ids = [token if token >= 0 else self._relay[-1 - token] for token in batch.token_ids.tolist()]
        assert min(ids) >= 0, "a row reads a token that was never drawn"
        starts, tables, pool = batch.row_starts.tolist(), batch.page_tables, self._pool
        self._contexts = []
        for row, length in enumerate(batch.context_lens.tolist()):
            begin, end = starts[row], starts[row + 1]
            pages, first = tables[row], length - (end - begin)
            if end - begin == 1:
                pool[pages[first // PAGE_SIZE], first % PAGE_SIZE] = ids[begin]
            else:
                at = np.arange(first, length)
                pool[pages[at // PAGE_SIZE], at % PAGE_SIZE] = ids[begin:end]
            self._contexts.append(pool[pages[: -(-length // PAGE_SIZE)]].reshape(-1)[:length])
        self._batch, self._ids = batch, ids
        self._tick(0.001)

    def sample(self, sampling: Sampling) -> StepOutput:
        batch, self._batch = self._batch, None
        assert batch is not None, "a sample without its forward"
        self.late_samples += 1
        tokens = np.zeros(len(batch.sample), dtype=np.int32)
        out = StepOutput(tokens, np.zeros(len(tokens), dtype=np.bool_) if self.failing is None else self.failing(batch))
        drawing = [row for row, draws in enumerate(batch.sample.tolist()) if draws]
        plain, slots, contexts = plain_rows(sampling), batch.slots.tolist(), self._contexts
        assert len(drawing) == len(plain)
        for s, row in enumerate(drawing):
            token = next_token(contexts[row]) if plain[s] else self._draw(row, s, sampling, out)
            tokens[row] = self._relay[slots[row]] = token
        self._prompt_logprobs(batch, out)
        self._pooled(batch, out)
        return out

    def _draw(self, row: int, s: int, sampling: Sampling, out: StepOutput) -> int:
        context = self._contexts[row]
        logits = logits_of(context)
        if sampling.bias_starts is not None:
            span = slice(sampling.bias_starts[s], sampling.bias_starts[s + 1])
            np.add.at(logits, sampling.bias_ids[span], sampling.bias_values[span])
        if sampling.count_starts is not None:
            span = slice(sampling.count_starts[s], sampling.count_starts[s + 1])
            ids, counts = sampling.count_ids[span], sampling.counts[span]
            logits[ids] = np.where(logits[ids] > 0, logits[ids] / sampling.repetition[s], logits[ids] * sampling.repetition[s])
            logits[ids] -= counts * sampling.frequency[s] + (counts > 0) * sampling.presence[s]
        if sampling.masks is not None and sampling.mask_rows[s] >= 0:
            allowed = np.unpackbits(sampling.masks[sampling.mask_rows[s]].view(np.uint8), bitorder="little")[:VOCAB].astype(bool)
            logits[~allowed] = -np.inf
        scores = logits.astype(np.float64)
        if sampling.temperature[s] > 0:
            noise = np.random.default_rng([int(sampling.seed[s]), len(context)]).gumbel(size=VOCAB)
            token = int(np.argmax(scores / sampling.temperature[s] + noise))
        else:
            token = int(np.argmax(scores))
        if sampling.logprobs is not None and sampling.logprobs[s] >= 0:
            out.logprobs[row] = top_logprobs([token], [logits], int(sampling.logprobs[s]))
        return token

    def _prompt_logprobs(self, batch: StepInput, out: StepOutput) -> None:
        if batch.prompt_logprobs is None or batch.next_ids is None:
            return
        for row, k in enumerate(batch.prompt_logprobs.tolist()):
            if k < 0:
                continue
            span = slice(batch.row_starts[row], batch.row_starts[row + 1])
            places = [(int(p), int(n)) for p, n in zip(batch.positions[span], batch.next_ids[span], strict=True) if n >= 0]
            out.prompt_logprobs[row] = top_logprobs([n for _, n in places], [logits_of(self._contexts[row][: p + 1]) for p, _ in places], k)

    def _pooled(self, batch: StepInput, out: StepOutput) -> None:
        if batch.pool is None:
            return
        for row, how in enumerate(batch.pool.tolist()):
            if how == POOL_NONE:
                continue
            span = slice(batch.row_starts[row], batch.row_starts[row + 1])
            states = [hidden_of(int(t), int(p)) for t, p in zip(self._ids[span], batch.positions[span], strict=True)]
            out.pooled[row] = states[-1] if how == POOL_LAST else np.sum(states, axis=0, dtype=np.float32)

    def read_page(self, page: int) -> bytes:
        return bytes(self._pool[page].tobytes())

    def write_page(self, page: int, data: bytes | memoryview) -> None:
        self._pool[page] = np.frombuffer(data, dtype=np.int32)

    def poison(self, pages: Sequence[int]) -> None:
        self._pool[list(pages)] = POISON


def top_logprobs(tokens: Sequence[int], logits: Sequence[F32], k: int) -> TopLogprobs:
    """Of as many places as tokens."""
    chosen, ids, values = [], [], []
    for token, row in zip(tokens, logits, strict=True):
        norm = row.astype(np.float64) - np.logaddexp.reduce(row.astype(np.float64))
        best = np.argsort(-norm, kind="stable")[:k]
        chosen.append(norm[token])
        ids.append(best)
        values.append(norm[best])
    shape = (len(chosen), k)
    return TopLogprobs(
        np.array(chosen, dtype=np.float32), np.array(ids, dtype=np.int32).reshape(shape), np.array(values, dtype=np.float32).reshape(shape)
    )
