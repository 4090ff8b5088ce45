"""The generated CRD: up to date, structural, described, and with every status field that the operator writes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet_contract.launch import USER_FLAGS
from fleet_operator import crds
from fleet_operator.api.v1alpha1 import InferenceServiceSpec, InferenceServiceStatus
from fleet_testing.operator_world import World, pair

ROOT = Path(__file__).resolve().parents[2]


def schema() -> dict[str, Any]:
    found: dict[str, Any] = crds.crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def nodes(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, node
    for name, child in (node.get("properties") or {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            yield from nodes(node[key], f"{path}[]")


@pytest.mark.parametrize("path", [crds.CRD_PATH, crds.CHART_PATH], ids=["crds", "chart"])
def test_the_committed_file_is_what_the_models_say(path: Path) -> None:
    assert path.read_text() == crds.files()[path], "run: python -m fleet_operator.crds"
    assert yaml.safe_load(path.read_text()) == crds.crd()


def test_the_schema_is_structural() -> None:
    for path, node in nodes(schema()):
        assert "$ref" not in node and "default" not in node and "title" not in node, path
        assert ("type" in node) != bool(node.get("x-kubernetes-int-or-string")), path
        assert not ("properties" in node and "additionalProperties" in node), path


def test_every_field_that_a_user_may_set_has_a_description() -> None:
    spec = schema()["properties"]["spec"]
    for path, node in nodes(spec, "spec"):
        for name, child in (node.get("properties") or {}).items():
            assert len(child.get("description", "")) > 10, f"{path}.{name}"


def test_every_string_list_and_map_of_the_spec_is_bounded() -> None:
    for path, node in nodes(schema()["properties"]["spec"], "spec"):
        if node.get("type") == "string":
            assert "maxLength" in node or "enum" in node, path
        if node.get("type") == "array":
            assert "maxItems" in node, path
        if node.get("type") == "object" and "additionalProperties" in node:
            assert "maxProperties" in node, path


def test_every_rule_has_a_message_for_humans() -> None:
    rules = [r for _, node in nodes(schema()) for r in node.get("x-kubernetes-validations", ())]
    assert len(rules) > 15 and all(len(r["message"]) > 15 and "self" in r["rule"] for r in rules)


def test_the_allowed_flags_are_those_of_the_runtime() -> None:
    (rule,) = schema()["properties"]["spec"]["properties"]["engine"]["properties"]["args"]["x-kubernetes-validations"]
    assert all(f"'{flag}'" in rule["rule"] and flag in rule["message"] for flag in USER_FLAGS)


def test_names_columns_and_the_status_subresource() -> None:
    spec = crds.crd()["spec"]
    assert spec["names"]["shortNames"] == ["infsvc"] and spec["names"]["categories"] == ["radixfleet"]
    version = spec["versions"][0]
    assert version["subresources"] == {"status": {}}
    assert [c["name"].upper() for c in version["additionalPrinterColumns"]] == "MODEL READY PREFILL DECODE REVISION REASON URL AGE".split()


async def test_every_status_field_that_is_written_is_in_the_schema() -> None:
    world = World()
    world.cluster.put_service("chat", pair())
    await world.settle()
    status = world.cluster.service("chat")["status"]
    assert InferenceServiceStatus.model_validate(status).model_dump(by_alias=True, exclude_none=True) == status
    for condition in status["conditions"]:
        assert datetime.fromisoformat(condition["lastTransitionTime"]).tzinfo == UTC


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda p: p.name)
def test_examples_use_only_fields_that_exist(path: Path) -> None:
    for doc in yaml.safe_load_all(path.read_text()):
        if doc["kind"] == "InferenceService":
            spec = InferenceServiceSpec.model_validate(doc["spec"])
            assert spec.model_dump(by_alias=True, exclude_unset=True) == doc["spec"]
