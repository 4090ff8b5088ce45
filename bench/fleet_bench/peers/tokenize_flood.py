"""`python -m fleet_bench.peers.tokenize_flood URL MODEL`: small /tokenize requests without a pause until SIGTERM, then how many a second.

A process of its own, at the lowest priority: it keeps the front end busy without taking the measuring client's time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fleet_bench.client import Client, Endpoint, fetch

CLIENTS = 4


async def flood(url: str, model: str) -> None:
    """Runs until SIGTERM. Prints `flowing` after the first answer, and at the end the rate."""
    client = Client(Endpoint.from_url(url), headers={}, clock=time.monotonic)
    body = json.dumps({"model": model, "prompt": "How many tokens are in this sentence?"}).encode()
    stop, answers, begin = asyncio.Event(), 0, time.monotonic()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

    async def one() -> None:
        nonlocal answers, begin
        while not stop.is_set():
            answer = await fetch(client, "POST", "/tokenize", body)
            if answer.status != 200:
                raise SystemExit(f"/tokenize answered HTTP {answer.status}: {answer.body[:200].decode(errors='replace')}")
            if answers == 0:
                begin = time.monotonic()
                print("flowing", flush=True)
            answers += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(one())
    client.close()
    print(f"{answers / max(time.monotonic() - begin, 1e-9):.1f}")


def main(argv: Sequence[str]) -> int:
    """Two words: URL and model."""
    os.nice(19)
    os.setsid()  # a priority counts inside a session only, sched(7): this session gets it too
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("19")
    asyncio.run(flood(argv[0], argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
