"""What a flag's value may be, and its default, in words: for `--help` and for docs/flags.md. Pure."""

from __future__ import annotations

from typing import Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo


def allowed(info: FieldInfo) -> str:
    """What a value may be. Values that can be named stand between backquotes."""
    kind = info.annotation
    if get_origin(kind) is Literal:
        return ", ".join(f"`{v}`" for v in get_args(kind))
    if kind is bool:
        return "`true`, `false`"
    parts = []
    for limit in info.metadata:
        match limit:
            case Ge():
                parts.append(f"≥ {limit.ge}")
            case Gt():
                parts.append(f"> {limit.gt}")
            case Le():
                parts.append(f"≤ {limit.le}")
            case Lt():
                parts.append(f"< {limit.lt}")
    words = {int: "integer", float: "number"}.get(kind, "text") if isinstance(kind, type) else "text, may be repeated"
    return f"{words} {', '.join(parts)}".strip()


def default(info: FieldInfo) -> str:
    """What holds when the flag is not given."""
    return "required" if info.is_required() else "none" if info.default in ("", ()) else f"`{_shown(info.default)}`"


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
