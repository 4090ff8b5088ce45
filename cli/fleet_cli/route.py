"""`radixfleet route explain`: where a request would go now, and why, without sending it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fleet_cli.control_port import DEFAULT_URL, URL_HELP, ControlError, ask, seconds, table


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 explained, 1 the router does not answer or refuses, 2 a wrong command line."""
    p = argparse.ArgumentParser("radixfleet route", description="Explain decisions of a router.", allow_abbrev=False)
    commands = p.add_subparsers(dest="command", required=True, metavar="COMMAND")
    e = commands.add_parser("explain", help="where a request would go now, and why; nothing is sent to a worker", allow_abbrev=False)
    e.add_argument("body", nargs="?", metavar="FILE", help="JSON body of any request; - reads standard input")
    e.add_argument("--path", default="", metavar="PATH", help="where the body would be sent, as /v1/messages (default: what its fields tell)")
    e.add_argument("--prompt", metavar="TEXT", help="instead of FILE: one user message")
    e.add_argument("--model", default="", metavar="NAME", help="with --prompt: the model it names (default: the router's only one)")
    e.add_argument("--url", default=DEFAULT_URL, help=URL_HELP)
    e.add_argument("--json", action="store_true", help="print the router's answer as it is")
    args = p.parse_args(argv)
    if (args.body is None) == (args.prompt is None):
        print("radixfleet route explain: give one of FILE and --prompt TEXT", file=sys.stderr)
        return 2
    try:
        if args.prompt is not None:
            body = json.dumps({"model": args.model or _only_model(args.url), "messages": [{"role": "user", "content": args.prompt}]}).encode()
        else:
            body = sys.stdin.buffer.read() if args.body == "-" else Path(args.body).read_bytes()
        answer = ask(args.url, f"/debug/route?path={quote(args.path)}" if args.path else "/debug/route", body)
    except OSError as error:
        print(f"radixfleet route explain: {args.body} cannot be read: {error.strerror}", file=sys.stderr)
        return 2
    except ControlError as error:
        print(f"radixfleet route explain: {error}", file=sys.stderr)
        return 1
    print(json.dumps(answer, indent=2) if args.json else "\n".join(words(answer)))
    return 0


def _only_model(url: str) -> str:
    services = ask(url, "/debug/overview")["services"]
    if len(services) != 1:
        there = ", ".join(s["model"] for s in services) or "none"
        raise ControlError(f"--model is needed: the router serves {there}")
    return str(services[0]["model"])


def words(answer: dict[str, Any]) -> list[str]:
    """The decision for people. Pure."""
    chosen = [w["worker"] for w in answer["workers"] if w["chosen"]]
    estimate = " (an estimate: the router has no tokenizer of this model yet, or the body holds no single prompt"
    read = "" if answer["tokenized"] else estimate + ("; prefixes are told by their bytes)" if answer.get("keys") == "bytes" else ")")
    equals = f"; {answer['equals']} more would do as well" if answer["equals"] else ""
    lines = [
        f"service {answer['service']}, revision {answer['revision'] or '-'}: {answer['promptTokens']:,} prompt tokens{read}, "
        f"an answer of {answer['answerTokens']:,} expected",
        f"goes to {' > '.join(chosen)}, {seconds(answer['costSeconds'])}: {answer['reason']}{equals}",
        "",
    ]
    rows = [
        (
            "*" if w["chosen"] else "", w["worker"], w["role"], f"{w['hitTokens']:,}",
            *(seconds(w[part]) for part in ("wait", "work", "decode", "room", "penalty", "costSeconds")),
        )
        for w in sorted(answer["workers"], key=lambda w: (w["role"], w["costSeconds"]))
    ]  # fmt: skip
    head = ("", "WORKER", "ROLE", ">CACHED", ">WAIT", ">WORK", ">DECODE", ">ROOM", ">PENALTY", ">COST")
    return lines + table(head, rows)
