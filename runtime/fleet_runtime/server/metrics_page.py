"""`python -m fleet_runtime.server.metrics_page`: writes docs/metrics.md from what `/metrics` says; a test compares them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final

from fleet_runtime.heartbeat import COUNTERS
from fleet_runtime.server.metrics import Metrics

PAGE: Final = Path(__file__).parents[3] / "docs" / "metrics.md"
_HEAD: Final = """# Metrics of a worker

Made by `python -m fleet_runtime.server.metrics_page`. `GET /metrics` of a worker (internal port 8001, and its data port, where an API key is asked
for if there are any), Prometheus text format. Names in `_total` only grow while the process that counts them lives.

| name | kind | what it says |
|---|---|---|
"""


def page() -> str:
    """The whole page."""
    text = Metrics().render(open_requests=0, late_messages=0, texts_encoded=0, ended=Counter(), scheduler=dict.fromkeys(COUNTERS, 0))
    rows = []
    helps = [line.removeprefix("# HELP ").split(" ", 1) for line in text.splitlines() if line.startswith("# HELP ")]
    kinds = dict(line.removeprefix("# TYPE ").split(" ", 1) for line in text.splitlines() if line.startswith("# TYPE "))
    for name, words in helps:
        rows.append(f"| `{name}` | {kinds[name]} | {words} |")
    return _HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
