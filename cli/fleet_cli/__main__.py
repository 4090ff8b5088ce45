"""`radixfleet`: serve a model or ask it something without a cluster, run a local cluster, look at a router, measure an endpoint."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from fleet_cli import __version__, generate, route, serve, top

USAGE = """usage: radixfleet COMMAND [arguments]

  serve MODEL   router and workers as plain processes on this machine: no Kubernetes, no root
  generate      one answer of a model, without a server
  local ...     a real one-node Kubernetes cluster on this machine: up, down, status, logs, kubectl, helm
  top           what a router does now: workers, load, cached prefixes, queues, decisions
  route explain where a request would go now, and why
  replay ...    what would this routing rule and this many workers do with a log of requests?
  bench ...     load on any OpenAI endpoint, and the profile of a worker's step: serve, step
  version       print the version

Each command takes --help."""


def _local(argv: Sequence[str]) -> int:
    try:
        from fleet_local.cli import main as local_main
    except ModuleNotFoundError as e:  # the optional extra `local`
        print(f"radixfleet local needs {e.name}: pip install 'radixfleet[local]'", file=sys.stderr)
        return 2
    return local_main(list(argv))


def _replay(argv: Sequence[str]) -> int:
    """Becomes `python -m fleet_router.replay`."""
    if find_spec("numpy") is None:  # the optional extra `router`
        print("radixfleet replay needs numpy: pip install 'radixfleet[router]'", file=sys.stderr)
        return 2
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "fleet_router.replay", *argv])


def _bench(argv: Sequence[str]) -> int:
    """Becomes `python -m fleet_bench`."""
    for module in ("fleet_bench", "httptools", "uvloop"):  # the optional extra `bench`
        if find_spec(module) is None:
            print(f"radixfleet bench needs {module}: pip install 'radixfleet[bench]'", file=sys.stderr)
            return 2
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "fleet_bench", *argv])


def _version(argv: Sequence[str]) -> int:
    print(__version__)
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "serve": serve.main,
    "generate": generate.main,
    "local": _local,
    "top": top.main,
    "route": route.main,
    "bench": _bench,
    "replay": _replay,
    "version": _version,
    "--version": _version,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Dispatches to a command; exit codes 0 fine, 1 failed, 2 wrong usage."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if words else 2
    command = COMMANDS.get(words[0])
    if command is None:
        print(f"radixfleet: {words[0]!r} is not a command; one of: {', '.join(c for c in COMMANDS if c[0] != '-')}", file=sys.stderr)
        return 2
    return command(words[1:])


if __name__ == "__main__":
    sys.exit(main())
