"""Log probabilities of an executor's step as messages carry them, and as a hand-over does. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from fleet_runtime.engine.base import TopLogprobs
from fleet_runtime.messages import TokenLogprob


class _HandedOver(Struct, array_like=True):
    """`Done.logprobs`: of the first token, and of the prompt."""

    first: TokenLogprob | None = None
    prompt: list[TokenLogprob] | None = None


def token_logprobs(tokens: Sequence[int], top: TopLogprobs) -> list[TokenLogprob]:
    """One per place. Raises ValueError if the executor gave another number of places."""
    if len(top.chosen) != len(tokens):
        raise ValueError(f"the executor gave logprobs of {len(top.chosen)} places, not of {len(tokens)}")
    rows = zip(tokens, top.chosen.tolist(), top.ids.tolist(), top.values.tolist(), strict=True)
    return [TokenLogprob(token=token, logprob=chosen, top_ids=ids, top=values) for token, chosen, ids, values in rows]


def encode_logprobs(first: TokenLogprob | None, prompt: list[TokenLogprob] | None) -> bytes:
    """For `Done.logprobs`; empty if there are none."""
    return msgspec.msgpack.encode(_HandedOver(first, prompt)) if first is not None or prompt is not None else b""


def decode_logprobs(data: bytes) -> tuple[TokenLogprob | None, list[TokenLogprob] | None]:
    """Inverse of `encode_logprobs`. Raises msgspec.DecodeError."""
    handed = msgspec.msgpack.decode(data, type=_HandedOver) if data else _HandedOver()
    return handed.first, handed.prompt
