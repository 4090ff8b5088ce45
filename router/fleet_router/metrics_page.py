"""`python -m fleet_router.metrics_page`: writes docs/router-metrics.md from what `metrics` knows; a test compares them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fleet_contract import names
from fleet_router.metrics import HELP, LABELS, PREFIX

PAGE: Final = Path(__file__).parents[2] / "docs" / "router-metrics.md"
_HEAD: Final = """# Metrics of a router

Made by `python -m fleet_router.metrics_page`. `GET /metrics` of the control port ({port}), Prometheus text format: the sum of all processes of a
router pod. Names in `_total` only grow, and hold what processes that have ended had counted. A family is there once it has something to tell. No
label holds what a client sent.

| name | kind | labels | what it says |
|---|---|---|---|
"""


def kind(name: str) -> str:
    """Prometheus' word for it."""
    return "counter" if name.endswith("_total") else "histogram" if name == "first_byte_seconds" else "gauge"


def page() -> str:
    """The whole page."""
    rows = [f"| `{PREFIX}{name}` | {kind(name)} | {', '.join(LABELS.get(name, ()))} | {text} |" for name, text in HELP.items()]
    return _HEAD.format(port=names.ROUTER_CONTROL_PORT) + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
