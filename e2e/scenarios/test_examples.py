"""Each file of examples/ does what it says: applied as it is, it becomes Ready and answers. (quickstart.yaml: test_quickstart.py.)"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fleet_testing.fleet import Fleet

pytestmark = pytest.mark.e2e

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
COVERED_ELSEWHERE = {"quickstart.yaml"}


@pytest.mark.parametrize("name", sorted(p.name for p in EXAMPLES.glob("*.yaml") if p.name not in COVERED_ELSEWHERE))
def test_the_example_becomes_ready_and_answers(fleet: Fleet, name: str) -> None:
    text = (EXAMPLES / name).read_text()
    documents = [d for d in yaml.safe_load_all(text) if d]
    fleet.kubectl("apply", "-f", "-", input=text)
    try:
        for d in documents:
            meta, model = d["metadata"], d["spec"]["model"]["name"]
            fleet.wait_ready(meta["name"], meta["namespace"])
            answer = fleet.client().chat.completions.create(model=model, messages=[{"role": "user", "content": "Hello!"}], max_tokens=4)
            assert answer.choices[0].finish_reason in ("stop", "length")
            assert answer.usage is not None and answer.usage.completion_tokens > 0
    finally:
        fleet.kubectl("delete", "-f", "-", "--timeout=60s", input=text)
