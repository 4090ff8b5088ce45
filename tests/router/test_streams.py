"""Streams through the router: bytes, usage at any split, what a slow reader costs (R21, R22)."""

from __future__ import annotations

import pytest

from fleet_testing.fake_worker import Script, sse
from fleet_testing.router_fleet import MakeFleet, MakeWorker

USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 7}}
WITH_USAGE = sse({"choices": [{"index": 0, "delta": {"content": "é"}}]}, {"choices": [], "usage": USAGE})


@pytest.mark.rule("R22")
@pytest.mark.case("C44")
async def test_usage_is_found_wherever_the_stream_is_split(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    """Red with the last piece alone in `tail` of `Attempt._learn_from_stream`."""
    worker = await make_worker()
    fleet = await make_fleet(worker)
    for at in range(1, len(WITH_USAGE)):
        worker.scripts.append(Script(pieces=[WITH_USAGE[:at], WITH_USAGE[at:]]))
        assert (await fleet.chat(stream=True)).content == WITH_USAGE
        assert fleet.counter("cached_tokens_total") == 7 * at, f"not seen when split at {at}"
