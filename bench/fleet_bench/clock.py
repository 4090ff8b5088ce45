"""The clock of a measurement: a monotonic count of seconds. Tests put their own in."""

from __future__ import annotations

from collections.abc import Callable

Clock = Callable[[], float]
