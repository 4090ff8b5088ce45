"""Which revision of a service a request goes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def choose_revision(weights: Sequence[tuple[str, int]], ready_units: dict[str, int], draw: Callable[[int], int]) -> str | None:
    """The revision a request goes to.

    Args:
        weights: `status.traffic`; empty when the operator wrote none.
        ready_units: for each revision with ready workers, how many pairs or unified workers.
    Returns:
        A revision of `ready_units`, drawn by weight, or by ready units where the weights name no ready revision; None without any.
    """
    shares = [(rev, weight) for rev, weight in weights if weight > 0 and ready_units.get(rev, 0) > 0]
    if not shares:
        shares = sorted((rev, n) for rev, n in ready_units.items() if n > 0)
    if not shares:
        return None
    if len(shares) == 1:
        return shares[0][0]
    at = draw(sum(weight for _, weight in shares))
    for rev, weight in shares:
        if at < weight:
            return rev
        at -= weight
    raise AssertionError("the weights do not add up")
