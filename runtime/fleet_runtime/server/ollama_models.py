"""What `/api/tags`, `/api/ps` and `/api/show` tell of the model that this worker serves."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from fleet_runtime.models.files import read_config
from fleet_runtime.server.parsing.registry import NONE
from fleet_runtime.server.state import HttpState
from fleet_text.ollama_chat import LATEST

_NEVER: Final = "9999-12-31T23:59:59Z"  # when the model is unloaded
_WEIGHTS: Final = ("*.safetensors", "*.gguf")


def listed(state: HttpState) -> list[dict[str, Any]]:
    """One entry for each name; those without a tag get `:latest`, as Ollama's clients expect."""
    folder = _folder(state)
    same = {"modified_at": _modified(folder), "size": _size(folder), "digest": state.config.model_revision, "details": _details(state, folder)}
    return [{"name": name, "model": name, **same} for name in map(_tagged, state.config.served_names)]


def loaded(state: HttpState) -> list[dict[str, Any]]:
    """The same, as what is in memory."""
    more = {"expires_at": _NEVER, "size_vram": 0, "context_length": state.flags.context_length}
    return [{k: v for k, v in entry.items() if k != "modified_at"} | more for entry in listed(state)]


def shown(state: HttpState) -> dict[str, Any]:
    """The model as a whole. Raises ApiError 503 while the tokenizer is loaded."""
    text, folder = state.ready_text(), _folder(state)
    details = _details(state, folder)
    config = read_config(folder) if folder is not None else {}
    family = details["family"]
    info: dict[str, Any] = {"general.architecture": family, f"{family}.context_length": state.flags.context_length}
    for name, key in (("hidden_size", "embedding_length"), ("num_hidden_layers", "block_count"), ("num_attention_heads", "attention.head_count")):
        if isinstance(config.get(name), int):
            info[f"{family}.{key}"] = config[name]
    able = ["completion"]
    able += ["tools"] if text.format.tools != NONE else []
    able += ["thinking"] if text.format.reasoning != NONE else []
    told = {"modelfile": "", "parameters": "", "template": text.encoder.template_source or "", "details": details, "model_info": info}
    return told | {"capabilities": able, "modified_at": _modified(folder)}


def _tagged(name: str) -> str:
    return name if ":" in name.rsplit("/", 1)[-1] else name + LATEST


def _folder(state: HttpState) -> Path | None:
    return Path(state.config.model_folder) if state.config.model_folder else None


def _details(state: HttpState, folder: Path | None) -> dict[str, Any]:
    config = read_config(folder) if folder is not None else {}
    family = config.get("model_type")
    family = family if isinstance(family, str) else "simulated"
    kind = "" if folder is None else "safetensors" if any(folder.glob("*.safetensors")) else "gguf"
    stored = config.get("dtype") or config.get("torch_dtype")  # the older name
    given = next((flag for flag in (state.flags.weight_dtype, state.flags.dtype) if flag != "auto"), None)
    precision = given or (stored if isinstance(stored, str) else "")
    return {"parent_model": "", "format": kind, "family": family, "families": [family], "parameter_size": "", "quantization_level": precision}


def _size(folder: Path | None) -> int:
    """Bytes of the weights' files."""
    return 0 if folder is None else sum(path.stat().st_size for pattern in _WEIGHTS for path in folder.glob(pattern))


def _modified(folder: Path | None) -> str:
    """When the model's folder changed; for a model without one, the beginning of time."""
    seconds = folder.stat().st_mtime if folder is not None else 0.0
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
