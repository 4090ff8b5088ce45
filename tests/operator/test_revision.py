"""Revisions: what makes a new one and what does not; pinning; names within their budgets."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_contract import names
from fleet_contract.launch import RuntimeLaunch
from fleet_operator.api import quantity
from fleet_operator.api.v1alpha1 import InferenceServiceSpec
from fleet_operator.render.revision import from_object, render_template, revision_of, to_object
from fleet_operator.settings import Defaults

BASE = {
    "model": {"uri": "bundled://smollm2-135m-instruct", "name": "m"},
    "engine": {"contextLength": 2048, "kvCache": {"memory": "1Gi"}, "args": {"max-rows": "8"}},
    "prefill": {"resources": {"requests": {"cpu": "1", "memory": "1Gi"}}},
    "decode": {"podTemplate": {"env": [{"name": "A", "value": "1"}], "nodeSelector": {"memory": "big"}}},
    "drain": {"timeoutSeconds": 60},
}


def revision(change: dict[str, object] | None = None) -> str:
    return revision_of(InferenceServiceSpec.model_validate({**json.loads(json.dumps(BASE)), **(change or {})}))


SAME = {
    "replicas": {"prefill": {**BASE["prefill"], "replicas": 7}},  # type: ignore[dict-item]
    "another spelling of a quantity": {"prefill": {"resources": {"requests": {"cpu": "1000m", "memory": "1024Mi"}}}},
    "a number for a quantity": {"prefill": {"resources": {"requests": {"cpu": 1, "memory": 1073741824}}}},
    "empty maps": {"prefill": {**BASE["prefill"], "podTemplate": {}}},  # type: ignore[dict-item]
    "null": {"unified": None},
    "a field of a newer API": {"router": {"dedicated": None}},
}
OTHER = {
    "model": {"model": {"uri": "bundled://smollm2-135m-instruct"}},
    "engine": {"engine": {"contextLength": 2049}},
    "a resource": {"prefill": {"resources": {"requests": {"cpu": "2", "memory": "1Gi"}}}},
    "the pod template": {"decode": {"podTemplate": {"env": [{"name": "A", "value": "2"}]}}},
    "drain": {"drain": {"timeoutSeconds": 61}},
    "roles": {"prefill": None, "decode": None, "unified": {}},
}


@pytest.mark.parametrize("name", SAME)
def test_these_make_no_new_revision(name: str) -> None:
    assert revision(SAME[name]) == revision()  # type: ignore[arg-type]


def test_these_all_make_another_revision() -> None:
    found = {name: revision(change) for name, change in OTHER.items()}  # type: ignore[arg-type]
    assert len({*found.values(), revision()}) == len(OTHER) + 1


def test_the_order_of_keys_does_not_matter() -> None:
    turned = {k: BASE[k] for k in reversed(BASE)}
    assert revision_of(InferenceServiceSpec.model_validate(turned)) == revision()


def test_the_operators_version_and_image_do_not_reach_the_name() -> None:
    spec = InferenceServiceSpec.model_validate(BASE)
    first, second = (render_template("ns", "chat", spec, 1, Defaults(f"image:{v}", version=v)) for v in ("1", "2"))
    assert first.revision == second.revision and first.workloads != second.workloads


def test_a_pinned_template_reads_back_whole_from_json() -> None:
    template = render_template("ns", "chat", InferenceServiceSpec.model_validate(BASE), 3, Defaults("image", version="1"))
    obj = json.loads(json.dumps(to_object("ns", "chat", template, version="1")))
    assert from_object(obj) == template
    with pytest.raises(ValueError, match="schema 9"):
        from_object({**obj, "data": {**obj["data"], "schema": 9}})


@given(st.from_regex(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True), st.sampled_from(names.ROLES))
def test_every_allowed_name_gives_children_within_the_limits(service: str, role: str) -> None:
    workload = names.workload_name(service, "0123abcd", role)
    assert len(workload) + 11 <= 63, "the StatefulSet's controller adds 11 characters in a label"
    assert len(names.revision_object_name(service, "0123abcd")) <= 63


def test_names_that_share_sixty_characters_do_not_collide() -> None:
    assert names.workload_name("a" * 60 + "x", "0123abcd", "decode") != names.workload_name("a" * 60 + "y", "0123abcd", "decode")


def container(role: str = "prefill") -> dict[str, object]:
    template = render_template("ns", "chat", InferenceServiceSpec.model_validate(BASE), 1, Defaults("image", version="1"))
    return dict(template.workloads[role]["spec"]["template"]["spec"]["containers"][0])


def test_the_command_line_is_one_that_the_runtime_reads() -> None:
    launch = RuntimeLaunch.from_argv(container()["args"])  # type: ignore[arg-type]
    assert launch.served_model_name == ("m", "ns/chat") and launch.role == "prefill" and launch.revision == revision()
    assert (launch.context_length, launch.kv_cache_memory, launch.max_rows, launch.drain_timeout) == (2048, 1 << 30, 8, 60)


def test_a_simulated_model_brings_its_executor() -> None:
    spec = InferenceServiceSpec.model_validate({"model": {"uri": "simulated://"}, "unified": {}})
    args = render_template("ns", "s", spec, 1, Defaults("i")).workloads["unified"]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert RuntimeLaunch.from_argv(args).executor == "simulated"


def test_pods_are_restricted_and_get_time_for_their_drain() -> None:
    template = render_template("ns", "chat", InferenceServiceSpec.model_validate(BASE), 1, Defaults("image", version="1"))
    for workload in template.workloads.values():
        spec = workload["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        (only,) = spec["containers"]
        security = only["securityContext"]
        assert security == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
        assert spec["automountServiceAccountToken"] is False and spec["terminationGracePeriodSeconds"] == 90
        assert "lifecycle" not in only
        assert (workload["spec"]["podManagementPolicy"], workload["spec"]["updateStrategy"]) == ("Parallel", {"type": "OnDelete"})
        assert workload["spec"]["selector"]["matchLabels"].items() <= workload["spec"]["template"]["metadata"]["labels"].items()


def test_the_config_map_is_what_the_pods_read_their_environment_from() -> None:
    template = render_template("ns", "chat", InferenceServiceSpec.model_validate(BASE), 1, Defaults("image", version="1"))
    assert container()["envFrom"] == [{"configMapRef": {"name": template.config["metadata"]["name"]}}]
    assert template.config["data"][names.ENV_SERVICE] == "chat"


def test_user_labels_never_win_over_selector_labels() -> None:
    sneaky = {"labels": {names.LABEL_ROLE: "decode", "team": "x"}}
    spec = InferenceServiceSpec.model_validate({"model": {"uri": "simulated://"}, "unified": {"podTemplate": sneaky}})
    labels = render_template("ns", "s", spec, 1, Defaults("i")).workloads["unified"]["spec"]["template"]["metadata"]["labels"]
    assert labels[names.LABEL_ROLE] == "unified" and labels["team"] == "x"


@pytest.mark.parametrize(
    ("text", "value"), [("1", 1), ("500m", "0.5"), ("1Ki", 1024), ("2e3", 2000), ("1.5Gi", 1610612736), (".5", "0.5"), ("1E", 10**18), ("1E2", 100)]
)
def test_quantities(text: str, value: object) -> None:
    assert quantity.parse(text) == quantity.parse(str(value))
    assert quantity.canonical(text) == quantity.canonical(str(value))


@pytest.mark.parametrize("text", ["", "x", "1 Gi", "1gi", "Gi", "1Gii", "--1", "1e", "0x10"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        quantity.parse(text)
