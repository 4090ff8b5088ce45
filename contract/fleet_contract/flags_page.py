"""`python -m fleet_contract.flags_page`: writes docs/flags.md from the flags themselves; a test compares them."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from fleet_contract.launch import USER_FLAGS, RuntimeLaunch, flag_name

PAGE: Final = Path(__file__).parents[2] / "docs" / "flags.md"
_HEAD: Final = """# Flags of `radixfleet-runtime`

Made by `python -m fleet_contract.flags_page`. In an InferenceService the flags marked *args* are set by `spec.engine.args` (without the dashes,
values are strings); the others follow from the rest of the spec. `radixfleet serve` takes those marked *args* by `--set name=value` (it has flags of
its own for the rest) and gives them to its workers; `radixfleet generate` takes others, too.

| flag | what it does | allowed | default | who sets it |
|---|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    rows = []
    for name, info in RuntimeLaunch.model_fields.items():
        who = "args" if name.replace("_", "-") in USER_FLAGS else "the spec"
        default = "required" if info.is_required() else "none" if info.default in ("", ()) else f"`{_shown(info.default)}`"
        rows.append(f"| `{flag_name(name)}` | {info.description} | {allowed(info)} | {default} | {who} |")
    return _HEAD + "\n".join(rows) + "\n"


def allowed(info: FieldInfo) -> str:
    """What a value may be, in words."""
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


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    PAGE.write_text(page())
