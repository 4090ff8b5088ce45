"""What is known of one request after it: its times and counts. Filled by `exchange`, read by `stats`. Seconds of the run's clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class Record:
    """One request. `origin_s` is the time that latencies count from: in the open modes when it should have been sent."""

    index: int
    session: int
    turn: int
    origin_s: float
    sent_s: float | None = None
    first_byte_s: float | None = None
    token_s: list[float] = field(default_factory=list)  # arrival of each event with text
    end_s: float | None = None
    status: int = 0
    error: str | None = None  # its kind: connect, timeout, http 503, error event, truncated, …
    message: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None  # of the usage; None: the server gave none
    cached_tokens: int | None = None
    text: str = ""  # kept for the history of a conversation only

    @property
    def ok(self) -> bool:
        return self.error is None and self.end_s is not None

    @property
    def output_tokens(self) -> int:
        """Of the usage, else the events with text."""
        return len(self.token_s) if self.completion_tokens is None else self.completion_tokens

    @property
    def ttft_s(self) -> float | None:
        return self.token_s[0] - self.origin_s if self.token_s else None

    @property
    def e2e_s(self) -> float | None:
        return None if self.end_s is None else self.end_s - self.origin_s

    @property
    def itl_s(self) -> list[float]:
        """Gaps between events with text. An event may hold several tokens; `tpot_s` does not depend on that."""
        return [b - a for a, b in pairwise(self.token_s)]

    @property
    def tpot_s(self) -> float | None:
        """Mean time of an output token after the first."""
        if self.output_tokens < 2 or len(self.token_s) < 2:
            return None
        return (self.token_s[-1] - self.token_s[0]) / (self.output_tokens - 1)
