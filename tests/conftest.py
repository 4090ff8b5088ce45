"""What all tests share: modules that are imported here run interpreted, so that tests can reach into them; whole programs run compiled."""

from __future__ import annotations

import os

os.environ.setdefault("RADIXFLEET_COMPILED", "0")  # before any of them is imported
