"""Where the microseconds of the scheduler's step go: `python -m fleet_runtime.scheduler.profile [--rows 32] [--steps 2000]`.

Runs the real loop over the simulated executor with steps that take no time, prints a table of its stages, and what the simulated executor
itself took (which the scheduler's share is without). Nothing is timed in tests; this is for people and for `make bench-runtime`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import msgspec

from fleet_contract.launch import RuntimeLaunch
from fleet_contract.wire import encode_ids
from fleet_contract.worker import Profile
from fleet_runtime.engine.simulated import PAGE_BYTES, SimulatedExecutor
from fleet_runtime.messages import Admit, Control, ControlReply, Embedded, Failed, HandedOver, Sampled, SampledBatch, encode
from fleet_runtime.scheduler.loop import Scheduler

_PAGES = 8192
_LONG = 60_000  # tokens to answer: no row ends during the profile


class _Sink:
    """Takes what the scheduler sends; encodes it, as the real one does."""

    def __init__(self) -> None:
        self.reply: ControlReply | None = None

    def sampled(self, items: list[Sampled]) -> None:
        encode(SampledBatch(items=items))

    def failed(self, message: Failed) -> None:
        raise RuntimeError(message.message)

    def handed_over(self, message: HandedOver) -> None:
        return None

    def embedded(self, message: Embedded) -> None:
        return None

    def control_reply(self, message: ControlReply) -> None:
        self.reply = message


def measure(*, rows: int, steps: int, prompt_tokens: int, overlap: bool) -> dict[str, Any]:
    """The answer of the control call `profile` for so many decode steps of so many rows."""
    flags = RuntimeLaunch.model_validate(
        {
            "model": "simulated://",
            "executor": "simulated",
            "max_rows": rows,
            "overlap": overlap,
            "context_length": _LONG + prompt_tokens,
            "kv_cache_memory": _PAGES * PAGE_BYTES,
        }
    )
    executor = SimulatedExecutor(num_pages=_PAGES * 64, profile=Profile(), slots=rows, sleep=lambda s: None)
    sink = _Sink()
    scheduler = Scheduler(flags, executor, sink, clock=time.monotonic)
    for n in range(rows):
        ids = encode_ids([(n * 7 + i * 13) % 256 for i in range(prompt_tokens)])
        scheduler.handle(Admit(rid=f"{n:032x}", ids=ids, max_new=_LONG, temperature=0.0, stop_ids=[257]))
    while len(scheduler.book.decoding) < rows:
        scheduler.iterate()
    for _ in range(20):
        scheduler.iterate()
    scheduler.handle(Control(id="profile", op="profile", args={"steps": steps, "timeout_s": 600}))
    while sink.reply is None:
        scheduler.iterate()
    return dict(msgspec.json.decode(sink.reply.data))


def table(profile: dict[str, Any], rows: int) -> str:
    """For people."""
    stages: dict[str, dict[str, float]] = profile["stages"]
    lines = [f"{rows} rows, {profile['steps']} steps; microseconds per step", f"{'stage':10} {'mean':>8} {'p50':>8} {'p99':>8} {'share':>7}"]
    for name, s in sorted(stages.items(), key=lambda item: -item[1]["mean_us"]):
        lines.append(f"{name:10} {s['mean_us']:8.1f} {s['p50_us']:8.1f} {s['p99_us']:8.1f} {s['share']:7.1%}")
    own = sum(s["mean_us"] for name, s in stages.items() if name != "executor")
    return "\n".join([*lines, f"scheduler without the executor: {own:.1f} us per step"])


def main(argv: list[str]) -> int:
    """Prints the table, or JSON."""
    parser = argparse.ArgumentParser(prog="python -m fleet_runtime.scheduler.profile", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=32, help="requests that run at once")
    parser.add_argument("--steps", type=int, default=2000, help="decode steps that are measured")
    parser.add_argument("--prompt-tokens", type=int, default=100, help="length of each prompt")
    parser.add_argument("--no-overlap", action="store_true", help="one step at a time")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    profile = measure(rows=args.rows, steps=args.steps, prompt_tokens=args.prompt_tokens, overlap=not args.no_overlap)
    print(json.dumps(profile) if args.json else table(profile, args.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
