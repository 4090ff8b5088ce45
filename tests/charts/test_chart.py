"""The chart, rendered by helm: rights, security, identity, and values that are checked."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet_contract import names
from fleet_operator.settings import parse

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "radixfleet"


def find_helm() -> str | None:
    """$RADIXFLEET_HELM, the one that the local cluster built, or one on the PATH."""
    cached = sorted(Path.home().glob(".cache/radixfleet/bin/*/helm"))
    return os.environ.get("RADIXFLEET_HELM") or (str(cached[-1]) if cached else None) or shutil.which("helm")


HELM = find_helm()
needs_helm = pytest.mark.skipif(HELM is None, reason="no helm: `radixfleet local up` builds one, or set RADIXFLEET_HELM")


def template(tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    command = [HELM, "template", "radixfleet", str(CHART), "--namespace", "radixfleet-system", *flags]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=False)


def objects(tmp_path: Path, *flags: str) -> dict[tuple[str, str], dict[str, Any]]:
    done = template(tmp_path, *flags)
    assert done.returncode == 0, done.stderr
    found = [doc for doc in yaml.safe_load_all(done.stdout) if doc]
    return {(doc["kind"], doc["metadata"]["name"]): doc for doc in found}


@needs_helm
def test_everything_that_is_needed_is_there_and_nothing_else(tmp_path: Path) -> None:
    assert sorted(objects(tmp_path)) == sorted(
        [
            ("ClusterRole", "radixfleet-operator"),
            ("ClusterRole", "radixfleet-router"),
            ("ClusterRoleBinding", "radixfleet-operator"),
            ("ClusterRoleBinding", "radixfleet-router"),
            ("CustomResourceDefinition", "inferenceservices.radixfleet.io"),
            ("Deployment", "radixfleet-operator"),
            ("Deployment", "radixfleet-router"),
            ("Role", "radixfleet-operator"),
            ("RoleBinding", "radixfleet-operator"),
            ("Service", "radixfleet-router"),
            ("ServiceAccount", "radixfleet-operator"),
            ("ServiceAccount", "radixfleet-router"),
        ]
    )


@needs_helm
def test_the_crd_survives_an_uninstall(tmp_path: Path) -> None:
    crd = objects(tmp_path)["CustomResourceDefinition", "inferenceservices.radixfleet.io"]
    assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert crd == yaml.safe_load((ROOT / "crds" / "inferenceservices.radixfleet.io.yaml").read_text())


@needs_helm
def test_nobody_may_read_secrets_and_nothing_is_granted_by_star(tmp_path: Path) -> None:
    rules = [rule for (kind, _), doc in objects(tmp_path).items() if kind in ("Role", "ClusterRole") for rule in doc["rules"]]
    assert rules
    for rule in rules:
        assert "secrets" not in rule["resources"]
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]


@needs_helm
@pytest.mark.parametrize("name", ["operator", "router"])
def test_pods_are_restricted_and_know_who_they_are(tmp_path: Path, name: str) -> None:
    deployment = objects(tmp_path)["Deployment", f"radixfleet-{name}"]
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] is True and spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    security = container["securityContext"]
    assert security == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    env = {e["name"] for e in container["env"]}
    assert {names.ENV_POD_NAME, names.ENV_POD_UID, names.ENV_NAMESPACE, names.ENV_POD_IP, "TMPDIR"} <= env
    assert {"name": "tmp", "mountPath": names.SCRATCH_DIR} in container["volumeMounts"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels[names.LABEL_NAME] == names.APP_NAME and labels[names.LABEL_COMPONENT] == name
    assert container["command"] == [f"radixfleet-{name}"]
    assert all(p in container for p in ("startupProbe", "livenessProbe", "readinessProbe"))


@needs_helm
def test_ports_and_flags_are_those_of_the_contract(tmp_path: Path) -> None:
    found = objects(tmp_path, "--set", "images.runtime=my/runtime:2", "--set", "imagePullPolicy=Never")
    (router,) = found["Deployment", "radixfleet-router"]["spec"]["template"]["spec"]["containers"]
    ports = {p["name"]: p["containerPort"] for p in router["ports"]}
    assert ports == {"data": names.ROUTER_DATA_PORT, "control": names.ROUTER_CONTROL_PORT, "peers": names.ROUTER_PEER_PORT}
    ports_of_it = ["--data-port", str(names.ROUTER_DATA_PORT), "--control-port", str(names.ROUTER_CONTROL_PORT)]
    assert router["args"] == ["--kubernetes", *ports_of_it, "--drain-timeout", "280", "--workers", "1"]
    (router,) = objects(tmp_path, "--set", "router.workers=auto")["Deployment", "radixfleet-router"]["spec"]["template"]["spec"]["containers"]
    assert router["args"][-1] == "auto"
    (operator,) = found["Deployment", "radixfleet-operator"]["spec"]["template"]["spec"]["containers"]
    assert operator["args"][:2] == ["--runtime-image=my/runtime:2", "--image-pull-policy=Never"]
    assert operator["ports"] == [{"name": "health", "containerPort": names.OPERATOR_HEALTH_PORT}]
    service = found["Service", names.ROUTER_SERVICE_NAME]["spec"]
    assert service["ports"][0] | {"port": names.ROUTER_SERVICE_PORT, "targetPort": "data"} == service["ports"][0]


@needs_helm
@pytest.mark.parametrize(("grace_s", "drain_s"), [(300, "280"), (60, "40"), (5, "1")])
def test_a_router_ends_its_drain_before_the_kubelet_ends_it(grace_s: int, drain_s: str, tmp_path: Path) -> None:
    found = objects(tmp_path, "--set", f"router.terminationGracePeriodSeconds={grace_s}")
    spec = found["Deployment", "radixfleet-router"]["spec"]["template"]["spec"]
    args = spec["containers"][0]["args"]
    assert (spec["terminationGracePeriodSeconds"], args[args.index("--drain-timeout") + 1]) == (grace_s, drain_s)


@needs_helm
def test_the_operators_flags_are_ones_that_it_reads(tmp_path: Path) -> None:
    from_chart = objects(tmp_path, "--set", "operator.watchNamespaces={a,b}", "--set", "operator.logLevel=debug")
    (operator,) = from_chart["Deployment", "radixfleet-operator"]["spec"]["template"]["spec"]["containers"]
    settings = parse(operator["args"], {})
    assert settings.watch_namespaces == ("a", "b") and settings.log_level == "debug"


@needs_helm
def test_keys_certificate_and_origins_of_the_router_come_from_values(tmp_path: Path) -> None:
    values = ("router.apiKeys.secretName=k", "router.tls.secretName=t", "router.corsOrigins={https://a.example,https://b.example}")
    found = objects(tmp_path, *itertools.chain.from_iterable(("--set", v) for v in values))
    spec = found["Deployment", "radixfleet-router"]["spec"]["template"]["spec"]
    (router,) = spec["containers"]
    flags = dict(zip(router["args"][1::2], router["args"][2::2], strict=True))
    mounts = {m["name"]: m["mountPath"] for m in router["volumeMounts"]}
    assert flags["--api-key-file"] == f"{mounts['api-keys']}/keys" and flags["--cors-origins"] == "https://a.example,https://b.example"
    assert (flags["--tls-cert-file"], flags["--tls-key-file"]) == (f"{mounts['tls']}/tls.crt", f"{mounts['tls']}/tls.key")
    secrets = {v["name"]: v["secret"] for v in spec["volumes"] if "secret" in v}
    assert secrets == {"api-keys": {"secretName": "k", "defaultMode": 0o444}, "tls": {"secretName": "t", "defaultMode": 0o444}}
    (port,) = found["Service", names.ROUTER_SERVICE_NAME]["spec"]["ports"]
    assert (port["name"], port["port"]) == ("https", 443)
    (operator,) = found["Deployment", "radixfleet-operator"]["spec"]["template"]["spec"]["containers"]
    assert parse(operator["args"], {}).url == "https://radixfleet-router.radixfleet-system/v1"


@needs_helm
def test_with_namespaces_the_operator_gets_roles_there_and_no_cluster_role(tmp_path: Path) -> None:
    done = template(tmp_path, "--set", "operator.watchNamespaces={a,b}")
    docs = [d for d in yaml.safe_load_all(done.stdout) if d and d["kind"].endswith(("Role", "RoleBinding"))]
    assert {(d["kind"], d["metadata"]["name"]) for d in docs if d["kind"].startswith("Cluster")} == {
        ("ClusterRole", "radixfleet-router"),
        ("ClusterRoleBinding", "radixfleet-router"),
    }
    assert {d["metadata"]["namespace"] for d in docs if d["metadata"]["name"] == "radixfleet-operator-services"} == {"a", "b"}


@needs_helm
@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("imagePullPolicy=Sometimes", "imagePullPolicy"),
        ("images.operator=", "operator"),
        ("operator.replicas=-1", "replicas"),
        ("router.service.type=Magic", "type"),
        ("router.workers=0", "workers"),
        ("no.such=1", "no"),
        ("router.corsOrigins={a.example}", "corsOrigins"),
    ],
)
def test_bad_values_are_refused_by_name(tmp_path: Path, flag: str, text: str) -> None:
    done = template(tmp_path, "--set", flag)
    assert done.returncode != 0 and text in done.stderr


def test_every_value_is_commented_and_has_a_schema() -> None:
    lines = (CHART / "values.yaml").read_text().splitlines()
    for before, line in itertools.pairwise(lines):
        leaf = line.strip()
        if leaf.startswith(("replicas:", "logLevel:", "watchNamespaces:", "resources:", "type:", "imagePullPolicy:", "extraArgs:", "workers:")):
            assert before.strip().startswith("#"), line
