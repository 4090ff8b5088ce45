"""A running fleet as the end-to-end scenarios see it: kubectl, the endpoint, the pods' own metrics. Works on any cluster."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import openai
import yaml

from fleet_contract import names

T = TypeVar("T")
METRIC_PREFIX = "radixfleet_runtime_"
POLL_S = 0.5  # a kubectl takes a tenth of a second of a core, which what is waited for would need too


class Kubectl(Protocol):
    """Runs kubectl against the cluster under test and returns its output. Raises when it fails."""

    def __call__(self, *args: str, input: str | None = None) -> str: ...


def wait_for(probe: Callable[[], T | None], *, within_s: float, what: str, every_s: float = 0.1) -> T:
    """Polls until the probe gives something true. Raises AssertionError that says what was waited for, and the last value."""
    deadline = time.monotonic() + within_s
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {within_s} s; last: {value!r}")
        time.sleep(every_s)


def manifest(name: str, namespace: str, **spec: Any) -> dict[str, Any]:
    """An InferenceService with the given spec."""
    return {
        "apiVersion": f"{names.API_GROUP}/{names.API_VERSION}",
        "kind": names.KIND,
        "metadata": {"name": name, "namespace": namespace},
        "spec": spec,
    }


def is_ready(pod: Mapping[str, Any]) -> bool:
    """By its condition."""
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))


RESOURCES = {"requests": {"cpu": "20m", "memory": "128Mi"}}


def simulated(name: str, namespace: str, *, drain_s: int = 30, args: Mapping[str, str] | None = None, **roles: int) -> dict[str, Any]:
    """A service whose workers compute nothing: replicas by role, e.g. prefill=1, decode=1."""
    return manifest(
        name,
        namespace,
        model={"uri": "simulated://", "name": name},
        engine={"contextLength": 2048, "kvCache": {"memory": "16Mi"}, "args": {"executor": "simulated", **(args or {})}},
        drain={"timeoutSeconds": drain_s},
        **{role: {"replicas": n, "resources": RESOURCES} for role, n in roles.items()},
    )


@dataclass(frozen=True)
class Fleet:
    """Operator, router and workers on one cluster."""

    kubectl: Kubectl
    url: str  # of the router, without /v1

    def apply(self, *documents: Mapping[str, Any]) -> str:
        return self.kubectl("apply", "-f", "-", input=yaml.safe_dump_all(documents))

    def get(self, kind: str, name: str, namespace: str) -> dict[str, Any]:
        return json.loads(self.kubectl("get", kind, name, "-n", namespace, "-o", "json"))  # type: ignore[no-any-return]

    def service(self, name: str, namespace: str) -> dict[str, Any]:
        return self.get("inferenceservices.radixfleet.io", name, namespace)

    def list(self, kind: str, namespace: str, selector: str = "") -> list[dict[str, Any]]:
        args = ("get", kind, "-n", namespace, "-o", "json", *(("-l", selector) if selector else ()))
        return json.loads(self.kubectl(*args))["items"]  # type: ignore[no-any-return]

    def pods(self, service: str, namespace: str, role: str | None = None) -> list[dict[str, Any]]:
        """Worker pods of a service that are not on their way out."""
        selector = f"{names.LABEL_SERVICE}={service}" + (f",{names.LABEL_ROLE}={role}" if role else "")
        return [p for p in self.list("pods", namespace, selector) if "deletionTimestamp" not in p["metadata"]]

    def ready_pods(self, service: str, namespace: str, role: str | None = None) -> list[dict[str, Any]]:
        return [p for p in self.pods(service, namespace, role) if is_ready(p)]

    def condition(self, name: str, namespace: str, kind: str) -> dict[str, Any]:
        """A condition of a service; empty when it is not there yet."""
        found = [c for c in self.service(name, namespace).get("status", {}).get("conditions", []) if c["type"] == kind]
        return found[0] if found else {}

    def explain(self, name: str, namespace: str) -> str:
        """Everything that may say why a service does not get where it should."""
        status = self.service(name, namespace).get("status", {})
        pods = {p["metadata"]["name"]: p["status"].get("containerStatuses", p["status"].get("conditions")) for p in self.pods(name, namespace)}
        return json.dumps({"status": status, "pods": pods}, indent=1)

    def wait_condition(self, name: str, namespace: str, kind: str, status: str = "True", *, within_s: float = 180) -> dict[str, Any]:
        """Waits for a condition that speaks of the present generation."""

        def probe() -> dict[str, Any] | None:
            service = self.service(name, namespace)
            for c in service.get("status", {}).get("conditions", []):
                if c["type"] == kind and c["status"] == status and c.get("observedGeneration") == service["metadata"]["generation"]:
                    return c  # type: ignore[no-any-return]
            return None

        try:
            return wait_for(probe, within_s=within_s, every_s=POLL_S, what=f"{namespace}/{name} {kind}={status}")
        except AssertionError as e:
            raise AssertionError(f"{e}\n{self.explain(name, namespace)}") from None

    def wait_ready(self, name: str, namespace: str, *, within_s: float = 180) -> None:
        """Waits until the service is Ready: callable, and fully what its spec says."""
        self.wait_condition(name, namespace, "Ready", within_s=within_s)

    def raw(self, pod: dict[str, Any], port: int, path: str) -> str:
        """GET of a pod's port through the API server."""
        meta = pod["metadata"]
        return self.kubectl("get", "--raw", f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}:{port}/proxy{path}")

    def post(self, pod: dict[str, Any], port: int, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST of JSON to a pod's port through the API server."""
        meta = pod["metadata"]
        proxied = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}:{port}/proxy{path}"
        return json.loads(self.kubectl("create", "--raw", proxied, "-f", "-", input=json.dumps(body)))  # type: ignore[no-any-return]

    def metrics(self, pod: dict[str, Any]) -> dict[str, float]:
        """A worker's metrics without labels, our prefix cut off."""
        return parse_metrics(self.raw(pod, names.RUNTIME_INTERNAL_PORT, "/metrics"))

    def worker(self, pod: dict[str, Any]) -> dict[str, Any]:
        return json.loads(self.raw(pod, names.RUNTIME_INTERNAL_PORT, "/worker"))  # type: ignore[no-any-return]

    def routers(self) -> list[dict[str, Any]]:
        selector = f"{names.LABEL_COMPONENT}={names.COMPONENT_ROUTER}"
        return [p for p in self.list("pods", names.SYSTEM_NAMESPACE, selector) if "deletionTimestamp" not in p["metadata"]]

    def inflight(self, service: str, namespace: str) -> int:
        """Requests that routers have in flight at a service's workers."""
        total = 0
        for router in self.routers():
            report = json.loads(self.raw(router, names.ROUTER_CONTROL_PORT, f"/fleet/{namespace}/{service}"))
            total += sum(w["inflight"] for r in report["revisions"].values() for w in r["workers"])
        return total

    def client(self, *, timeout_s: float = 60, retries: int = 0) -> openai.OpenAI:
        """The official client."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=timeout_s, max_retries=retries)


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text to name -> value; samples with labels are left out."""
    found = re.findall(rf"^{METRIC_PREFIX}(\w+) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}
