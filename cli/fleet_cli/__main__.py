"""`radixfleet`: serve a model or ask it something without a cluster, or run a local cluster."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from fleet_cli import __version__, generate, serve

USAGE = """usage: radixfleet COMMAND [arguments]

  serve MODEL   router and workers as plain processes on this machine: no Kubernetes, no root
  generate      one answer of a model, without a server
  local ...     a real one-node Kubernetes cluster on this machine: up, down, status, logs, kubectl, helm
  version       print the version

Each command takes --help."""


def _local(argv: Sequence[str]) -> int:
    try:
        from fleet_local.cli import main as local_main
    except ModuleNotFoundError as e:  # the optional extra `local`
        print(f"radixfleet local needs {e.name}: pip install 'radixfleet[local]'", file=sys.stderr)
        return 2
    return local_main(list(argv))


def _version(argv: Sequence[str]) -> int:
    print(__version__)
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "serve": serve.main, "generate": generate.main, "local": _local, "version": _version, "--version": _version,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Dispatches to a command; exit codes 0 fine, 1 failed, 2 wrong usage."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if words else 2
    command = COMMANDS.get(words[0])
    if command is None:
        print(f"radixfleet: {words[0]!r} is not a command; one of: serve, generate, local, version", file=sys.stderr)
        return 2
    return command(words[1:])


if __name__ == "__main__":
    sys.exit(main())
