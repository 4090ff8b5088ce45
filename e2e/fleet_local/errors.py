"""The error that a user of the local cluster sees: one line that says what is wrong and what to do."""

from __future__ import annotations


class ClusterError(Exception):
    """Ends a command with exit code 1; its text is for the user, and may carry more lines (the end of a log) after the first."""
