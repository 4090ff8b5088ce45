"""`radixfleet-runtime` with the scripted scheduler in place of the real one. `python -m fleet_testing.fake_runtime FLAGS`."""

from __future__ import annotations

import os
import sys

from fleet_runtime import messages as m
from fleet_runtime.launch import run
from fleet_runtime.supervisor.children import MODULES

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], os.environ, {**MODULES, m.SCHEDULER: "fleet_testing.fake_scheduler"}))
