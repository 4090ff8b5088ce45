"""The runtime. For programs that want a model without a server: `from fleet_runtime import Engine`. It is loaded when it is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from fleet_contract.errors import ApiError as ApiError
    from fleet_runtime.errors import StartError as StartError
    from fleet_runtime.offline.engine import Engine as Engine

_LAZY: Final = {"Engine": "fleet_runtime.offline.engine", "ApiError": "fleet_contract.errors", "StartError": "fleet_runtime.errors"}


def __getattr__(name: str) -> Any:
    """The processes of a worker import this package too, and need none of it."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
