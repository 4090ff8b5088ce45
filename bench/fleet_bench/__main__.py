"""`python -m fleet_bench COMMAND`; `radixfleet bench COMMAND` starts it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from fleet_bench import serve, step

USAGE = """usage: radixfleet bench COMMAND [options]

  serve    load on an OpenAI endpoint: latencies, throughput, goodput
  step     who takes the microseconds of a running worker's step

Each command takes --help."""

COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"serve": serve.main, "step": step.main}


def main(argv: Sequence[str] | None = None) -> int:
    """Dispatches to a command; exit code 2 for wrong usage."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if words else 2
    command = COMMANDS.get(words[0])
    if command is None:
        print(f"radixfleet bench: {words[0]!r} is not a command; one of: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return command(words[1:])


if __name__ == "__main__":
    sys.exit(main())
