"""`radixfleet bench step`: asks a running worker where the time of its steps goes, and prints it.

With `--kernels` it becomes the native executor's own program instead, which computes steps without a worker and tells which kernels take their time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

from fleet_bench.client import CannotConnect, Client, ConnectionLost, Endpoint, fetch, header_lines
from fleet_bench.report import write_json

PATH: Final = "/profile"
KERNELS: Final = "--kernels"
EXECUTOR: Final = "executor"  # the stage that computes; all others are the scheduler's share


class Stage(msgspec.Struct, frozen=True):
    """Time of one stage of a step, in microseconds. `share`: part of the step, 0 to 1."""

    mean_us: float
    p50_us: float
    p99_us: float
    share: float


class StepProfile(msgspec.Struct, frozen=True):
    """Answer of `POST /profile` on a worker's internal port: how long each stage of `steps` steps took."""

    steps: int
    stages: dict[str, Stage]

    @property
    def scheduler_us(self) -> float:
        """Mean time of a step outside the executor."""
        return sum(stage.mean_us for name, stage in self.stages.items() if name != EXECUTOR)


class NoProfile(Exception):
    """The worker gave no profile; the message says why and what to do."""


async def ask(client: Client, steps: int, timeout_s: float) -> StepProfile:
    """Profiles the next `steps` steps; returns when they have run. Raises NoProfile."""
    where = f"{client.endpoint.authority}{PATH}"
    try:
        answer = await fetch(client, "POST", PATH, json.dumps({"steps": steps}).encode(), timeout_s=timeout_s)
    except (CannotConnect, ConnectionLost) as e:
        raise NoProfile(f"{where}: {e}") from e
    except TimeoutError as e:
        raise NoProfile(f"{where}: {steps} steps did not run within {timeout_s:g} s; a worker steps only while it has requests: send some") from e
    if answer.status == 404:
        raise NoProfile(f"{where} is not there; give the worker's internal port (radixfleet-runtime --internal-port, default 8001)")
    if answer.status != 200:
        raise NoProfile(f"{where} answered HTTP {answer.status}: {answer.body[:300].decode(errors='replace')}")
    try:
        return msgspec.json.decode(answer.body, type=StepProfile)
    except msgspec.MsgspecError as e:
        raise NoProfile(f"{where} answered something else than a profile: {e}") from e


def table(profile: StepProfile) -> str:
    """Stages, the longest first, and their sum."""
    total = sum(stage.mean_us for stage in profile.stages.values())
    lines = [
        f"{profile.steps} steps, {total:.0f} us each in these stages",
        "",
        f"{'stage':20}{'mean us':>11}{'p50 us':>11}{'p99 us':>11}{'share':>9}",
    ]
    for name, s in sorted(profile.stages.items(), key=lambda item: -item[1].mean_us):
        lines.append(f"{name:20}{s.mean_us:>11.1f}{s.p50_us:>11.1f}{s.p99_us:>11.1f}{s.share:>9.1%}")
    if EXECUTOR in profile.stages:
        lines += ["", f"outside the executor: {profile.scheduler_us:.0f} us a step"]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 printed, 1 no profile, 2 wrong usage."""
    if KERNELS in argv:
        return _kernels([word for word in argv if word != KERNELS])
    p = argparse.ArgumentParser(prog="radixfleet bench step", description="Where the time of a worker's steps goes; the worker must be at work.")
    p.add_argument("--url", default="http://127.0.0.1:8001", help="the worker's internal port (default %(default)s)")
    p.add_argument("--steps", type=int, default=200, help="steps to watch (default %(default)s)")
    p.add_argument("--timeout", type=float, default=60.0, metavar="S", help="how long to wait for them (default %(default)s)")
    p.add_argument("--api-key", help="sent as a bearer token")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the profile there too")
    more = "no worker: compute steps here by the native executor and tell which kernels take the time; has options of its own (--kernels --help)"
    p.add_argument(KERNELS, action="store_true", help=more)
    a = p.parse_args(argv)
    try:
        if a.steps < 1 or a.timeout <= 0:
            raise ValueError("--steps and --timeout must be more than 0")
        endpoint, headers = Endpoint.from_url(a.url), header_lines([], a.api_key)
    except ValueError as e:
        print(f"radixfleet bench step: {e}", file=sys.stderr)
        return 2

    async def run() -> StepProfile:
        client = Client(endpoint, headers=headers, clock=time.monotonic)
        try:
            return await ask(client, a.steps, a.timeout)
        finally:
            client.close()

    try:
        profile = asyncio.run(run())
    except NoProfile as e:
        print(f"radixfleet bench step: {e}", file=sys.stderr)
        return 1
    print(table(profile))
    if a.json is not None:
        write_json(a.json, msgspec.to_builtins(profile))
    return 0


def _kernels(argv: Sequence[str]) -> int:
    """Becomes the native executor's program; returns 2 only where the runtime is not installed."""
    if find_spec("fleet_runtime") is None:
        print("radixfleet bench step --kernels needs the runtime: pip install 'radixfleet[runtime]'", file=sys.stderr)
        return 2
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "fleet_runtime.engine.native.bench", "--profile", *argv])
