"""`radixfleet-router`: reads the flags and becomes the supervisor."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import fleet_contract.sigterm  # noqa: F401 - before all that takes time to import
from fleet_contract.logs import set_up_logging
from fleet_router.settings import BadFlag, parse
from fleet_router.supervisor import CannotStart, Supervisor


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 after a drain, 1 after a second signal or when a port cannot be bound, 2 for a wrong flag."""
    try:
        settings = parse(sys.argv[1:] if argv is None else argv)
    except BadFlag as e:
        print(f"radixfleet-router: {e}", file=sys.stderr)
        return 2
    set_up_logging("supervisor", settings.log_level)
    try:
        return Supervisor(settings).run()
    except CannotStart as e:
        print(f"radixfleet-router: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
