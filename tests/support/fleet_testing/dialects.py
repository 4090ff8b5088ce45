"""What the tests of the API dialects share."""

from __future__ import annotations

KEY = "a-key-of-the-tests"  # of the runtime that computes
