"""How much of the answers to come admission reserves, and who gives its pages back when that was too little. Pure.

A request may ask for a long answer and end early. So only a share of what is left of each answer is reserved, and the share falls while
nothing goes wrong. When pages run out, requests are retracted and the share is set to what would have been right. With a first share of 1
every page is promised at admission and nothing is ever retracted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from fleet_runtime.cache.memory import pages_for
from fleet_runtime.scheduler.request import Request

LEAST_SHARE: Final = 0.14  # of the first
DECAY_STEPS: Final = 600  # decode steps from the first share to the least
MOST_TOKENS: Final = 4096  # of one answer that are reserved at most
_AHEAD: Final = 20  # tokens that each request should get before the next retraction


@dataclass(slots=True)
class NewTokenRatio:
    """See the module. `value` is the share now."""

    first: float
    value: float = 0.0

    def __post_init__(self) -> None:
        self.value = self.first

    @property
    def promises_all(self) -> bool:
        return self.first >= 1.0

    def decay(self) -> None:
        """A decode step went well."""
        least = self.first * LEAST_SHARE
        self.value = max(least, self.value - (self.first - least) / DECAY_STEPS)

    def retracted(self, running: Sequence[Request]) -> None:
        """Pages ran out: the share was too small, so it never falls here. running: those that go on."""
        done = sum(r.completion_tokens for r in running)
        most = sum(r.admit.max_new for r in running)
        self.value = min(1.0, max(self.value, (done + _AHEAD * len(running)) / (most + 1)))

    def reset(self) -> None:
        """Nothing runs any more."""
        self.value = self.first

    def wanted_pages(self, request: Request) -> int:
        """Pages that this request will probably have at its end."""
        left = min(request.admit.max_new - request.completion_tokens, MOST_TOKENS)
        share = self.value if request.stop_ids else 1.0  # nothing ends it early but its client
        return min(request.total_pages, pages_for(max(request.length, request.target) + int(left * share)))

    def reserved(self, running: Iterable[Request]) -> int:
        """Pages beyond their promises that these will probably take."""
        return sum(max(0, self.wanted_pages(r) - r.lease.count - r.lease.promised) for r in running if r.lease is not None)


def victims(holders: Sequence[Request]) -> list[Request]:
    """Who gives its pages back, first to last: least answer and longest prompt first, so that least is computed twice; one is always kept."""
    return sorted(holders, key=lambda r: (r.completion_tokens, -r.prompt_tokens, -r.arrived))[: max(0, len(holders) - 1)]
