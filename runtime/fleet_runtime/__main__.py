"""Entry of `radixfleet-runtime`."""

from __future__ import annotations

import os
import sys

import fleet_contract.sigterm  # noqa: F401 - before all that takes time to import
from fleet_runtime.launch import run


def main() -> None:
    """Console script: exits with the worker's code."""
    sys.exit(run(sys.argv[1:], os.environ))


if __name__ == "__main__":
    main()
