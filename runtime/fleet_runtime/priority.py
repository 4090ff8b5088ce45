"""Front-end work yields to the engine: a compute thread that is descheduled holds up every barrier of a step."""

from __future__ import annotations

import os
from typing import Final

_NICE: Final = 10


def yield_to_engine() -> None:
    """Lowers this process's priority. Called by http and the detokenizer once they are loaded: a restart itself must be quick."""
    os.nice(_NICE)
