"""The self-check at idle: cheap counts each second, all invariants each minute. A fault is logged, counted and repaired; it never ends the worker.

Repair trusts what live requests hold and what the prefix tree says, in this order, and rebuilds the counts from it. What still contradicts
itself is given up: the requests that hold pages fail, and the cache begins anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from fleet_contract import errors
from fleet_contract.errors import ApiError
from fleet_runtime.scheduler.book import Book

log = logging.getLogger(__name__)
QUICK_S: Final = 1.0
FULL_S: Final = 60.0


class SelfCheck:
    """See the module. Called by the loop when nothing runs."""

    def __init__(self, book: Book, clock: Callable[[], float]) -> None:
        self._book = book
        self._clock = clock
        self._next_quick = clock() + QUICK_S
        self._next_full = clock() + FULL_S

    def run(self) -> None:
        """Checks what is due."""
        now = self._clock()
        if now < self._next_quick:
            return
        self._next_quick = now + QUICK_S
        check = self._book.check_quickly
        if now >= self._next_full:
            self._next_full = now + FULL_S
            check = self._book.check_integrity
        try:
            check()
        except Exception as e:  # AssertionError mostly; a broken structure may raise anything
            self._repair(e)

    def _repair(self, fault: Exception) -> None:
        book = self._book
        book.totals.self_check_failures += 1
        log.error("the self-check found a fault, it is repaired: %s", fault, exc_info=fault)
        try:
            book.rebuild()
            book.check_integrity()
            return
        except Exception as e:  # see above
            log.error("rebuilding the counts was not enough, the cache begins anew: %s", e)
        lost = ApiError(500, "the KV memory of this request was lost", type=errors.SERVER, code="self_check_failed")
        book.start_anew(lost)
