"""`python -m fleet_contract.flags_page`: writes docs/flags.md from the flags themselves; a test compares them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fleet_contract import flag_words
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
        rows.append(f"| `{flag_name(name)}` | {info.description} | {flag_words.allowed(info)} | {flag_words.default(info)} | {who} |")
    return _HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
