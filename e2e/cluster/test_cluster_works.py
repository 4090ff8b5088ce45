"""The cluster behaves as a real one: nodes, restricted pods, Services, DNS, logs, exec, CRDs, garbage collection."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from fleet_local.api import ClusterClient, is_true
from fleet_local.hostview import IMAGE

pytestmark = pytest.mark.e2e

RESTRICTED = {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def pod(name: str, *command: str, labels: dict[str, str] | None = None, **container: Any) -> dict[str, Any]:
    """A pod that the `restricted` pod security standard admits."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels or {}},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "securityContext": {"runAsNonRoot": True, "runAsUser": 65534, "runAsGroup": 65534, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{"name": "main", "image": IMAGE, "command": list(command), "securityContext": RESTRICTED, **container}],
            "volumes": [{"name": "tmp", "emptyDir": {}}],
        },
    }


def web(name: str, **more: Any) -> dict[str, Any]:
    probe = {"httpGet": {"port": 8000, "path": "/"}, "periodSeconds": 1}
    return pod(name, "python", "-m", "http.server", "8000", "--directory", "/opt", labels={"app": name}, readinessProbe=probe, **more)


def service(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": {"app": name}, "ports": [{"port": 80, "targetPort": 8000}]},
    }


def until(probe: Callable[[], bool], *, within_s: float = 30) -> None:
    limit = time.monotonic() + within_s
    while not probe():
        assert time.monotonic() < limit
        time.sleep(0.1)


def test_the_node_is_ready_and_says_its_version(cluster: ClusterClient) -> None:
    [node] = cluster.get("nodes")["items"]
    assert is_true(node, "Ready")
    assert node["status"]["nodeInfo"]["kubeletVersion"].startswith("v1.")
    assert json.loads(cluster.kubectl("version", "-o", "json").stdout)["serverVersion"]["gitVersion"] == node["status"]["nodeInfo"]["kubeletVersion"]


def test_a_restricted_pod_runs_the_code_of_the_checkout_as_nobody(cluster: ClusterClient, namespace: str) -> None:
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    code = "import os, fleet_contract; print(os.getuid(), fleet_contract.__name__); open('/x', 'w')"
    limits = {"limits": {"memory": "64Mi", "cpu": "500m"}}
    cluster.apply(pod("job", "python", "-c", code, resources=limits) | {}, namespace=namespace)
    cluster.kubectl(
        "wait", "-n", namespace, "pod/job", "--for=jsonpath={.status.containerStatuses[0].lastState.terminated.exitCode}=1", "--timeout=60s"
    )
    log = cluster.kubectl("logs", "-n", namespace, "job", "--previous").stdout
    assert "65534 fleet_contract" in log and "Read-only file system: '/x'" in log


def test_the_console_scripts_are_found_in_a_pod(cluster: ClusterClient, namespace: str) -> None:
    cluster.apply(pod("shell", "sleep", "600"), namespace=namespace)
    cluster.kubectl("wait", "-n", namespace, "pod/shell", "--for=condition=Ready", "--timeout=60s")
    script = "for p in radixfleet-operator radixfleet-router radixfleet-runtime; do command -v $p || exit 1; done; ls -d /opt/radixfleet/models"
    found = cluster.kubectl("exec", "-n", namespace, "shell", "--", "sh", "-c", script).stdout
    assert len(found.split()) == 4


def test_a_pod_is_held_to_its_memory_limit(cluster: ClusterClient, namespace: str) -> None:
    cluster.apply(pod("hungry", "python", "-c", "b = bytearray(300 * 2**20)", resources={"limits": {"memory": "64Mi"}}), namespace=namespace)
    reason = "--for=jsonpath={.status.containerStatuses[0].lastState.terminated.reason}=OOMKilled"
    cluster.kubectl("wait", "-n", namespace, "pod/hungry", reason, "--timeout=60s")


def test_a_service_is_reached_by_name_from_another_pod_and_follows_its_pods(cluster: ClusterClient, namespace: str) -> None:
    cluster.apply(web("web"), namespace=namespace)
    cluster.apply(service("web"), namespace=namespace)
    cluster.apply(pod("client", "sleep", "600"), namespace=namespace)
    cluster.kubectl("wait", "-n", namespace, "pod/web", "pod/client", "--for=condition=Ready", "--timeout=60s")

    def fetch() -> bool:
        code = f"import urllib.request as r; print(r.urlopen('http://web.{namespace}.svc.cluster.local', timeout=2).status)"
        result = cluster.kubectl("exec", "-n", namespace, "client", "--", "python", "-c", code, check=False)
        return result.stdout.strip() == "200"

    until(fetch)
    cluster.kubectl("delete", "-n", namespace, "pod/web")
    until(lambda: not fetch())
    cluster.apply(web("web"), namespace=namespace)
    until(fetch)


def test_a_stateful_set_has_pods_with_names_of_their_own_in_dns(cluster: ClusterClient, namespace: str) -> None:
    template = web("set")
    cluster.apply({**service("set"), "spec": {**service("set")["spec"], "clusterIP": "None"}}, namespace=namespace)
    cluster.apply(
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": {"name": "set"},
            "spec": {
                "replicas": 2,
                "serviceName": "set",
                "podManagementPolicy": "Parallel",
                "selector": {"matchLabels": {"app": "set"}},
                "template": {"metadata": {"labels": {"app": "set"}}, "spec": template["spec"]},
            },
        },
        namespace=namespace,
    )
    cluster.kubectl("rollout", "status", "-n", namespace, "statefulset/set", "--timeout=60s")
    address = cluster.get("pod", "set-1", "-n", namespace)["status"]["podIP"]

    def resolved() -> bool:
        code = f"import socket; print(socket.gethostbyname('set-1.set.{namespace}.svc.cluster.local'))"
        return cluster.kubectl("exec", "-n", namespace, "set-0", "--", "python", "-c", code, check=False).stdout.strip() == address

    until(resolved)


def test_a_pods_server_is_reached_through_the_api_server_and_by_port_forward(cluster: ClusterClient, namespace: str) -> None:
    cluster.apply(web("web"), namespace=namespace)
    cluster.kubectl("wait", "-n", namespace, "pod/web", "--for=condition=Ready", "--timeout=60s")
    assert "Directory listing" in cluster.pod_get(namespace, "web", 8000, "/")
    with cluster.published(namespace, "pod/web", 8000) as url:
        assert url.startswith("http://127.0.0.1:")


def test_what_is_owned_goes_with_its_owner(cluster: ClusterClient, namespace: str) -> None:
    cluster.kubectl("create", "-n", namespace, "configmap", "owner")
    uid = cluster.get("configmap", "owner", "-n", namespace)["metadata"]["uid"]
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": uid}
    cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owned", "ownerReferences": [owner]}}, namespace=namespace)
    cluster.kubectl("delete", "-n", namespace, "configmap", "owner")
    cluster.kubectl("wait", "-n", namespace, "configmap/owned", "--for=delete", "--timeout=30s")


def test_a_bad_object_is_refused_with_the_rules_own_message(cluster: ClusterClient, namespace: str) -> None:
    rule = {"rule": "self.size <= 3", "message": "size must be at most 3"}
    schema = {
        "type": "object",
        "properties": {"spec": {"type": "object", "properties": {"size": {"type": "integer"}}, "x-kubernetes-validations": [rule]}},
    }
    group = f"{namespace}.radixfleet.test"
    crd = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"things.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"plural": "things", "singular": "thing", "kind": "Thing"},
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}],
        },
    }
    cluster.apply(crd)
    try:
        cluster.kubectl("wait", f"crd/things.{group}", "--for=condition=Established", "--timeout=30s")
        thing = {"apiVersion": f"{group}/v1", "kind": "Thing", "metadata": {"name": "a"}, "spec": {"size": 4}}
        until(lambda: cluster.kubectl("get", f"things.{group}", "-n", namespace, check=False).returncode == 0)
        result = cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(thing), check=False)
        assert result.returncode != 0 and "size must be at most 3" in result.stderr
    finally:
        cluster.kubectl("delete", f"crd/things.{group}", "--wait=false")
