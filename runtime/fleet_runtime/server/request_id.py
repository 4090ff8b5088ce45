"""The id that joins log lines, answers and errors of one request: taken from `X-Request-Id` or minted."""

from __future__ import annotations

import os
import re
from typing import Final

_ALLOWED: Final = re.compile(r"[\x21-\x7e]{1,128}")


def mint_request_id() -> str:
    """32 hex digits."""
    return os.urandom(16).hex()


def accept_request_id(given: str | None) -> str:
    """The client's id if it is 1 to 128 visible ASCII characters, else a new one."""
    return given if given is not None and _ALLOWED.fullmatch(given) else mint_request_id()
