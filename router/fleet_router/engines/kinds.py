"""The engines by name of their kind: our own runtime, vLLM, SGLang. Asked by registry, relay, encoders and answers."""

from __future__ import annotations

from typing import Final

from fleet_router.engines.base import Engine
from fleet_router.engines.radixfleet import Radixfleet
from fleet_router.engines.sglang import Sglang
from fleet_router.engines.vllm import Vllm

_OURS: Final[Engine] = Radixfleet()
_ENGINES: Final[dict[str, Engine]] = {e.kind: e for e in (_OURS, Vllm(), Sglang())}


def engine_of(kind: str) -> Engine:
    """The engine of a record; one that a newer worker names is taken for our own, whose readers ignore what they do not know."""
    return _ENGINES.get(kind, _OURS)
