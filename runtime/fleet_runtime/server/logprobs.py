"""Logprobs in the shapes of the OpenAI API (chat, completions) and vLLM's `prompt_logprobs`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fleet_runtime.messages import TokenLogprob
from fleet_runtime.server.token_texts import Offsets, TokenTexts

_LEAST: Final = -9999.0  # OpenAI's number for "very unlikely": JSON has no infinity


def finite(logprob: float) -> float:
    """A logprob that JSON can hold."""
    return logprob if logprob >= _LEAST else _LEAST


def chat_logprobs(items: Sequence[TokenLogprob], top: int, texts: TokenTexts) -> dict[str, Any]:
    """`choices[].logprobs` of chat: one entry a token."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = texts.bytes_of(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(data)}

    content = [entry(i.token, i.logprob) | {"top_logprobs": [entry(t, p) for t, p in zip(i.top_ids[:top], i.top[:top], strict=True)]} for i in items]
    return {"content": content, "refusal": None}


def completion_logprobs(items: Sequence[TokenLogprob | int], top: int, texts: TokenTexts, offsets: Offsets) -> dict[str, Any]:
    """`choices[].logprobs` of completions. An item that is a bare id has no logprob: the first token of an echoed prompt.

    The chosen token is always among `top_logprobs`. Where two ids have one text (parts of characters), the likelier one stands there.
    """
    tokens: list[str] = []
    chosen: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    starts: list[int] = []
    for item in items:
        token = item if isinstance(item, int) else item.token
        tokens.append(texts.text_of(token))
        starts.append(offsets.next(token))
        if isinstance(item, int):
            chosen.append(None)
            tops.append(None)
            continue
        chosen.append(finite(item.logprob))
        likely: dict[str, float] = {}
        for t, p in zip(item.top_ids[:top], item.top[:top], strict=True):
            likely.setdefault(texts.text_of(t), finite(p))
        likely.setdefault(tokens[-1], finite(item.logprob))
        tops.append(likely)
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": starts}


def prompt_logprobs(items: Sequence[TokenLogprob], top: int, texts: TokenTexts) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each prompt token but the first (None), ids with logprob, rank (if among the most likely) and text."""
    out: list[dict[str, Any] | None] = [None]
    for item in items:
        place: dict[str, Any] = {}
        for rank, (token, logprob) in enumerate(zip(item.top_ids[:top], item.top[:top], strict=True), 1):
            place[str(token)] = {"logprob": finite(logprob), "rank": rank, "decoded_token": texts.text_of(token)}
        place.setdefault(str(item.token), {"logprob": finite(item.logprob), "rank": None, "decoded_token": texts.text_of(item.token)})
        out.append(place)
    return out
