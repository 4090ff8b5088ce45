"""`radixfleet generate PROMPT --model MODEL`: hands over to the runtime's own program, which has the arguments and their help."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec


def main(argv: Sequence[str]) -> int:
    """Becomes that program; returns 2 only when the runtime is not installed."""
    if find_spec("fleet_runtime") is None:
        print("radixfleet generate needs the runtime: pip install 'radixfleet[runtime]'", file=sys.stderr)
        return 2
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "fleet_runtime.generate", *argv])
