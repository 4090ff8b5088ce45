"""What the data port answers by itself, of its table alone: models in OpenAI's and Ollama's words, version. Pure but for the package's version.

Called by `service`, with the caller whose models are told.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from importlib import metadata
from typing import Any, Final

from fleet_router.edge.callers import Caller
from fleet_router.table import Service, Table
from fleet_text.ollama_chat import LATEST

VERSION: Final = metadata.version("radixfleet")
_NEVER: Final = "9999-12-31T23:59:59Z"  # when a model is unloaded


def models(table: Table[Any], caller: Caller) -> list[dict[str, Any]]:
    """All names that `model` may have, as `GET /v1/models` tells them."""
    return [
        {"id": name, "object": "model", "created": epoch(service.facts.created), "owned_by": "radixfleet"} for name, service in _named(table, caller)
    ]


def names(table: Table[Any], caller: Caller) -> list[str]:
    """Those that a caller may use."""
    return [name for name, _ in _named(table, caller)]


def ollama_tags(table: Table[Any], caller: Caller) -> list[dict[str, Any]]:
    """The same as `GET /api/tags` tells them; sizes and details are the workers' to tell (`POST /api/show`)."""
    details = {"parent_model": "", "format": "", "family": "", "families": [], "parameter_size": "", "quantization_level": ""}
    out: list[dict[str, Any]] = []
    for name, service in _named(table, caller):
        tagged = name if ":" in name.rsplit("/", 1)[-1] else name + LATEST
        revision = next((w.record.model_revision for w in service.workers if w.routable), "")
        modified = service.facts.created or "1970-01-01T00:00:00Z"
        out.append({"name": tagged, "model": tagged, "modified_at": modified, "size": 0, "digest": revision, "details": details})
    return out


def ollama_running(table: Table[Any], caller: Caller) -> list[dict[str, Any]]:
    """Those with ready workers, as `GET /api/ps` tells them."""
    ready = {name: service for name, service in _named(table, caller) if service.ready_units()}
    told = {name if ":" in name.rsplit("/", 1)[-1] else name + LATEST: service for name, service in ready.items()}
    return [
        {k: v for k, v in entry.items() if k != "modified_at"}
        | {"expires_at": _NEVER, "size_vram": 0, "context_length": max(w.record.context_length for w in told[entry["name"]].workers if w.routable)}
        for entry in ollama_tags(table, caller)
        if entry["name"] in told
    ]


def _named(table: Table[Any], caller: Caller) -> Iterator[tuple[str, Service[Any]]]:
    for name, key in sorted(table.names.items()):
        if caller.may_use(key, table.names):
            yield name, table.services[key]


def epoch(created: str) -> int:
    """Seconds of an RFC 3339 time; 0 for none."""
    try:
        return int(datetime.fromisoformat(created).timestamp()) if created else 0
    except ValueError:
        return 0
