"""What can go wrong between the operator and the API server, in words that the rest of the operator knows."""

from __future__ import annotations


class ClusterError(Exception):
    """A call to the API server failed. `status` is HTTP's, 0 when there was no answer; `message` is the server's own."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message

    @property
    def is_passing(self) -> bool:
        """True when the same call may succeed in a moment without anybody's doing."""
        return self.status in (0, 408, 409, 429) or self.status >= 500


class LeaseLost(Exception):
    """This process may no longer write."""
