"""What `GET /metrics` says, in Prometheus text format 0.0.4: counts of this process, and the scheduler's from the heartbeat board."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from starlette.types import Scope

from fleet_runtime.heartbeat import COUNTERS

_PREFIX: Final = "radixfleet_runtime_"
_TTFT_BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_REQUEST_BUCKETS: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


def endpoint_of(scope: Scope) -> str:
    """The route of an ASGI request, as metrics and traces name it; `other` where none matched, since paths are the client's to choose."""
    return str(scope["route"].path) if "route" in scope else "other"


class Histogram:
    """Counts per bucket, and the sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str) -> list[str]:
        out, running = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            out.append(f'{name}_bucket{{le="{bound}"}} {running}')
        return [*out, f"{name}_sum {self.total}", f"{name}_count {running}"]


@dataclass(slots=True)
class Metrics:
    """Counts of the http process since its start."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)  # endpoint, status
    first_token: Histogram = field(default_factory=lambda: Histogram(_TTFT_BUCKETS))
    queued: Histogram = field(default_factory=lambda: Histogram(_TTFT_BUCKETS))
    prefill: Histogram = field(default_factory=lambda: Histogram(_TTFT_BUCKETS))
    duration: Histogram = field(default_factory=lambda: Histogram(_REQUEST_BUCKETS))
    prompt_tokens: int = 0
    completion_tokens: int = 0
    disconnects: int = 0

    def render(self, *, open_requests: int, late_messages: int, texts_encoded: int, ended: Counter[str], scheduler: dict[str, int]) -> str:
        """The whole page. `ended`: connections ended by a limit. `scheduler`: counters of the board; names in _total only grow."""
        out: list[str] = []

        def family(name: str, kind: str, help: str, lines: list[str]) -> None:
            out.extend([f"# HELP {_PREFIX}{name} {help}", f"# TYPE {_PREFIX}{name} {kind}", *lines])

        def single(name: str, kind: str, help: str, value: int) -> None:
            family(name, kind, help, [f"{_PREFIX}{name} {value}"])

        answered = [
            f'{_PREFIX}http_requests_total{{endpoint="{endpoint}",code="{status}"}} {n}' for (endpoint, status), n in sorted(self.requests.items())
        ]
        family("http_requests_total", "counter", "Answers of the API by endpoint and status; 499: the client left first.", answered)
        single("http_open_requests", "gauge", "Generation requests between their headers and their end.", open_requests)
        ttft = f"{_PREFIX}time_to_first_token_seconds"
        family("time_to_first_token_seconds", "histogram", "From a request's headers to its first token.", self.first_token.lines(ttft))
        queued, prefill = f"{_PREFIX}queued_seconds", f"{_PREFIX}prefill_seconds"
        family("queued_seconds", "histogram", "From a request's arrival at the scheduler to its first step.", self.queued.lines(queued))
        family("prefill_seconds", "histogram", "From a request's first step to its first token.", self.prefill.lines(prefill))
        took = f"{_PREFIX}request_seconds"
        family("request_seconds", "histogram", "From a request's headers to its end.", self.duration.lines(took))
        single("prompt_tokens_total", "counter", "Prompt tokens of answered requests.", self.prompt_tokens)
        single("completion_tokens_total", "counter", "Completion tokens of answered requests.", self.completion_tokens)
        single("client_disconnects_total", "counter", "Requests whose client left before the end.", self.disconnects)
        cut = [f'{_PREFIX}connections_ended_total{{limit="{limit}"}} {n}' for limit, n in sorted(ended.items())]
        family("connections_ended_total", "counter", "Connections ended by a limit: header_timeout, header_size, write_timeout.", cut)
        single("late_messages_total", "counter", "Messages for requests that had ended already; they are ignored.", late_messages)
        single("texts_tokenized_total", "counter", "Texts that this process tokenized; a router's requests bring their ids.", texts_encoded)
        for name, value in scheduler.items():
            kind = "counter" if name.endswith("_total") and name != "pages_total" else "gauge"
            single(name, kind, COUNTERS[name], value)
        return "\n".join(out) + "\n"
