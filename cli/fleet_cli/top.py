"""`radixfleet top`: the router's dashboard in the terminal. Workers, load, hits, queues and the last decisions, anew each second."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from fleet_cli.control_port import DEFAULT_URL, URL_HELP, ControlError, ask, seconds, table

CLEAR: Final = "\x1b[H\x1b[2J"
BAR: Final = 10


def main(argv: Sequence[str]) -> int:
    """Runs until Ctrl-C. Exit code 1 when the router does not answer at the start, or with --once."""
    p = argparse.ArgumentParser("radixfleet top", description="Workers, load, cached prefixes, queues and decisions of a router.", allow_abbrev=False)
    p.add_argument("--url", default=DEFAULT_URL, help=URL_HELP)
    p.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between two pictures (default 1)")
    p.add_argument("--once", action="store_true", help="print one picture and end")
    p.add_argument("--json", action="store_true", help="print the numbers as one JSON object and end")
    args = p.parse_args(argv)
    if not 0.1 <= args.interval <= 3600:
        print(f"radixfleet top: --interval is {args.interval:g}; 0.1 to 3600 seconds are allowed", file=sys.stderr)
        return 2
    last: dict[str, Any] | None = None
    try:
        while True:
            try:
                now = ask(args.url, "/debug/overview")
            except ControlError as e:
                if last is None:
                    print(f"radixfleet top: {e}", file=sys.stderr)
                    return 1
                print(f"{CLEAR}{e}", flush=True)  # it may be restarting: the picture comes back by itself
                time.sleep(args.interval)
                continue
            if args.json:
                print(json.dumps(now))
                return 0
            if args.once:
                print("\n".join(picture(now, None, 0)))
                return 0
            size = shutil.get_terminal_size()
            print(CLEAR + "\n".join(picture(now, last, size.columns)[: size.lines - 1]), flush=True)
            last = now
            time.sleep(args.interval)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        return 0


def picture(now: dict[str, Any], last: dict[str, Any] | None, width: int) -> list[str]:
    """All lines of one picture; rates need the picture before. Pure."""
    lines = [*_summary(now, last), ""]
    lines += _services(now, width)
    lines += ["", *_workers(now, width)]
    if now["queues"]:
        rows = [
            (q["service"], q["revision"], f"{q['waiting']} of {q['maxRequests']}", seconds(q["oldestSeconds"]), seconds(q["predictedWaitSeconds"]))
            for q in now["queues"]
        ]
        lines += ["", *table(("QUEUE", "REVISION", ">WAITING", ">OLDEST", ">PREDICTED WAIT"), rows, width=width)]
    decisions = [
        (
            time.strftime("%H:%M:%S", time.localtime(d["at"])), d["service"], f"{d['promptTokens']:,}", f"{d['hitTokens']:,}",
            seconds(d["costSeconds"]), seconds(d["waitedSeconds"]) if d["waitedSeconds"] else "-", " > ".join(d["chosen"]), d["reason"],
        )
        for d in now["decisions"]
    ]  # fmt: skip
    head = ("DECIDED", "SERVICE", ">PROMPT", ">CACHED", ">COST", ">WAITED", "WORKER", "WHY")
    return [*lines, "", *table(head, decisions, width=width)]


def _summary(now: dict[str, Any], last: dict[str, Any] | None) -> list[str]:
    state = "draining" if now["draining"] else "ready" if now["synced"] else "syncing"
    sums, gauges = now["sums"], now["gauges"]
    text = f"router {now['routerId']}  {state}  " + "  ".join(
        f"{word} {gauges[name]:.0f}" for word, name in (("in flight", "inflight"), ("waiting", "waiting"), ("connections", "connections"))
    )
    if last is not None and now["at"] > last["at"] and sums["requests"] >= last["sums"]["requests"]:
        text += f"  {(sums['requests'] - last['sums']['requests']) / (now['at'] - last['at']):.1f} requests/s"
    prompt = sums["prompt_tokens"]
    if prompt:
        actual, predicted = 100 * sums["cached_tokens"] / prompt, 100 * sums["predicted_cached_tokens"] / prompt
        hits = f"cached prompt tokens {actual:.1f} % (predicted {predicted:.1f} %)"
    else:
        hits = "cached prompt tokens: none told yet"
    statuses = "  ".join(f"{status} {n:.0f}" for status, n in sorted(now["statuses"].items()))
    return [text, f"{hits}  retries {sums['retries']:.0f}  answers {statuses or 'none'}"]


def _services(now: dict[str, Any], width: int) -> list[str]:
    rows = [
        (s["service"], s["model"], r["revision"] or "-", r["weight"], r["readyUnits"], r["queued"]) for s in now["services"] for r in s["revisions"]
    ]
    return table(("SERVICE", "MODEL", "REVISION", ">WEIGHT", ">READY", ">QUEUED"), rows, width=width)


def _workers(now: dict[str, Any], width: int) -> list[str]:
    rows = [
        (
            w["pod"] or w["address"], w["service"].removeprefix("/"), w["role"],
            w["state"] if w["breaker"] == "closed" else f"{w['state']}, breaker {w['breaker']}", w["inflight"],
            f"{w['pend']:,.0f}", f"{w['run']:.0f}", _bar(w["kvUsed"], w["kvCapacity"]), _bar(w["indexedTokens"], w["kvCapacity"]),
            f"{w['prefillTokensPerS']:,.0f}",
        )
        for w in now["workers"]
    ]  # fmt: skip
    head = ("WORKER", "SERVICE", "ROLE", "STATE", ">IN FLIGHT", ">TO PREFILL", ">RUNNING", "KV IN USE", "KNOWN PREFIXES", ">PREFILL TOKENS/S")
    why = [f"{w['pod'] or w['address']} is {w['state']}: {w['reason']}" for w in now["workers"] if w["reason"] and w["state"] != "ready"]
    return table(head, rows, width=width) + [line[:width] if width else line for line in why]


def _bar(part: float, whole: float) -> str:
    share = min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0
    full = round(share * BAR)
    return f"{'#' * full}{'.' * (BAR - full)} {share:4.0%}"
