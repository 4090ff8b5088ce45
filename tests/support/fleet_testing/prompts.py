"""A request's prompt, read to its end."""

from __future__ import annotations

import asyncio
from typing import Any

from fleet_router.api.body import Parsed, Prompt, begin_prompt


async def read_prompt(parsed: Parsed, *how: Any) -> Prompt:
    """Args: how: as for `begin_prompt`."""
    begun = begin_prompt(parsed, *how)
    return begun if isinstance(begun, Prompt) else await asyncio.to_thread(begun)
