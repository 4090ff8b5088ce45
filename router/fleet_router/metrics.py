"""The numbers of all processes at one moment, and their Prometheus text.

Labels come from closed sets: no model, no client text. docs/router-metrics.md is made of HELP and LABELS.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
PREFIX: Final = "radixfleet_router_"
HELP: Final = {
    "requests_total": "Answers of the data port by path and status class.",
    "picks_total": "Choices of a worker by its role.",
    "retries_total": "Attempts after a failed one, before the client's first byte.",
    "retries_refused_total": "Attempts that were not made: a tenth of the requests may be tried again.",
    "breakers_opened_total": "Times that a worker got no requests for a while, after faults in a row.",
    "aborts_total": "Abort calls to workers.",
    "client_gone_total": "Clients that left before their answer was complete.",
    "safe_picks_total": "Choices of an edge without its brain.",
    "brain_lost_total": "Times that an edge lost its brain.",
    "limits_total": "Connections ended by a limit of the router.",
    "prompt_tokens_total": "Prompt tokens of requests whose worker told what it had cached.",
    "predicted_cached_tokens_total": "Tokens that the index expected to be cached for them.",
    "cached_tokens_total": "Tokens that were cached.",
    "event_gaps_total": "Gaps in the workers' KV events.",
    "event_restarts_total": "Streams of KV events that turned out to be another life of their worker.",
    "event_replays_total": "Streams made whole by a replay.",
    "event_snapshots_total": "Streams made whole by a snapshot.",
    "event_rounds_given_up_total": "Streams that could not be made whole: history counts until the next round of tries.",
    "event_streams_died_total": "Streams without even a heartbeat for so long that their content was dropped.",
    "bad_events_total": "KV events that were not used, by reason.",
    "peers": "Other routers: how many there should be, and how many of them are heard.",
    "peer_silences_total": "Times that another router was silent for so long that its picks stopped to count.",
    "event_streams": "Workers by how far their KV events are believed; none: they publish none.",
    "event_lag_seconds": "Longest time that the last KV events of a worker were on their way, by the clocks of both machines.",
    "first_byte_seconds": "From the whole request to the first byte of its answer.",
    "inflight": "Requests that are with workers.",
    "waiting": "Requests that wait in the router for a worker.",
    "connections": "Open connections of the data port.",
    "edges": "Processes that speak HTTP, where there are several.",
    "workers": "Workers by their state.",
    "index_keys": "Prefixes that the index knows, in blocks of 64 tokens or 256 bytes.",
    "up": "0: the deciding process does not answer.",
}
LABELS: Final[Mapping[str, tuple[str, ...]]] = {
    "requests_total": ("path", "status"),
    "picks_total": ("role",),
    "retries_total": ("reason",),
    "limits_total": ("limit",),
    "bad_events_total": ("reason",),
    "peers": ("state",),
    "event_streams": ("trust",),
    "workers": ("state",),
}


Labels = tuple[tuple[str, str], ...]
Row = tuple[str, Labels, float]  # name, labels, value


class Snapshot(Struct):
    """All numbers at one moment, for the control process."""

    counters: list[Row] = []
    gauges: list[Row] = []
    first_byte: list[int] = []
    first_byte_sum: float = 0.0


def merge(first: Snapshot, *others: Snapshot) -> Snapshot:
    """The sum of counters and histograms; gauges are those of the first."""
    counters: dict[tuple[str, Labels], float] = {}
    first_byte = [0] * (len(BUCKETS_S) + 1)
    seconds = 0.0
    for s in (first, *others):
        for name, labels, value in s.counters:
            counters[name, labels] = counters.get((name, labels), 0) + value
        for n, count in enumerate(s.first_byte):
            first_byte[n] += count
        seconds += s.first_byte_sum
    return Snapshot([(*key, value) for key, value in counters.items()], list(first.gauges), first_byte, seconds)


def number(value: float) -> str:
    """All digits: a counter of millions has to show that it grew by one."""
    return str(int(value)) if value == int(value) else repr(value)


def render(snapshot: Snapshot | None) -> str:
    """Prometheus text format 0.0.4. None: the brain does not answer, only `up 0` is known."""
    if snapshot is None:
        return f"# HELP {PREFIX}up {HELP['up']}\n# TYPE {PREFIX}up gauge\n{PREFIX}up 0\n"
    lines = _families("counter", snapshot.counters) + _families("gauge", snapshot.gauges)
    lines.append(f"# HELP {PREFIX}first_byte_seconds {HELP['first_byte_seconds']}")
    lines.append(f"# TYPE {PREFIX}first_byte_seconds histogram")
    total = 0
    for limit, count in zip([*map(str, BUCKETS_S), "+Inf"], snapshot.first_byte, strict=True):
        total += count
        lines.append(f'{PREFIX}first_byte_seconds_bucket{{le="{limit}"}} {total}')
    lines.append(f"{PREFIX}first_byte_seconds_sum {number(snapshot.first_byte_sum)}")
    lines.append(f"{PREFIX}first_byte_seconds_count {total}")
    return "\n".join(lines) + "\n"


def _families(kind: str, rows: list[Row]) -> list[str]:
    lines: list[str] = []
    last = ""
    for name, labels, value in sorted(rows):
        if name != last:
            lines.append(f"# HELP {PREFIX}{name} {HELP[name]}")
            lines.append(f"# TYPE {PREFIX}{name} {kind}")
            last = name
        inner = ",".join([f'{k}="{v}"' for k, v in labels])
        lines.append(f"{PREFIX}{name}{'{' + inner + '}' if inner else ''} {number(value)}")
    return lines
