"""The StatefulSet of one revision and role: flags, probes, identity, security context (contract sections 2 and 3).

Replicas and owner references are not rendered: a revision's template is pinned, and those two are the only parts that change.
"""

from __future__ import annotations

from typing import Any, Final

from fleet_contract import names
from fleet_contract.launch import RuntimeLaunch, user_args_to_fields
from fleet_operator.api import quantity
from fleet_operator.api.v1alpha1 import InferenceServiceSpec, PodTemplate, Resources, RoleSpec
from fleet_operator.render.labels import worker_labels, worker_selector
from fleet_operator.settings import Defaults

CONTAINER: Final = "runtime"
DEFAULT_CONTEXT_LENGTH: Final = 4096
DEFAULT_KV_MEMORY: Final = "1Gi"
DEFAULT_DRAIN_S: Final = 300
GRACE_BEYOND_DRAIN_S: Final = 30
NOBODY: Final = 65534
_PODINFO: Final = "radixfleet-podinfo"
_SCRATCH: Final = "radixfleet-scratch"


def drain_timeout_s(spec: InferenceServiceSpec) -> int:
    """Seconds of a drain, default filled in."""
    return DEFAULT_DRAIN_S if spec.drain is None or spec.drain.timeout_seconds is None else spec.drain.timeout_seconds


def runtime_launch(namespace: str, service: str, spec: InferenceServiceSpec, revision: str, role: str) -> RuntimeLaunch:
    """The command line of a worker. Raises BadFlag or pydantic's ValidationError when engine.args cannot be a command line."""
    engine = spec.engine
    fields = dict(user_args_to_fields(dict(engine.args or {}) if engine else {}))
    if spec.model.uri.startswith("simulated://"):
        fields["executor"] = "simulated"
    memory = engine.kv_cache.memory if engine and engine.kv_cache and engine.kv_cache.memory else DEFAULT_KV_MEMORY
    return RuntimeLaunch.model_validate(
        {
            **fields,
            "model": spec.model.uri,
            "served_model_name": (spec.model.name or service, f"{namespace}/{service}"),
            "role": role,
            "revision": revision,
            "context_length": (engine.context_length if engine else None) or DEFAULT_CONTEXT_LENGTH,
            "dtype": (engine.dtype if engine else None) or "auto",
            "kv_cache_memory": int(quantity.parse(memory)),
            "drain_timeout": drain_timeout_s(spec),
        }
    )


def render_workload(namespace: str, service: str, spec: InferenceServiceSpec, revision: str, role: str, defaults: Defaults) -> dict[str, Any]:
    """The StatefulSet, without replicas and owner references."""
    role_spec = spec.roles()[role]
    template = role_spec.pod_template or PodTemplate()
    labels = worker_labels(service, revision, role, version=defaults.version)
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": names.workload_name(service, revision, role), "namespace": namespace, "labels": labels},
        "spec": {
            "serviceName": names.revision_object_name(service, revision),
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "selector": {"matchLabels": worker_selector(service, revision, role)},
            "template": {
                "metadata": _present(labels={**(template.labels or {}), **labels}, annotations=dict(template.annotations or {})),
                "spec": _pod_spec(template, spec, _container(namespace, service, spec, revision, role, role_spec, template, defaults)),
            },
        },
    }


def _pod_spec(template: PodTemplate, spec: InferenceServiceSpec, container: dict[str, Any]) -> dict[str, Any]:
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # So that no program of ours is process 1, for which the kernel drops a SIGTERM until a handler is set: a pod that is deleted while
        # Python still boots would live on until its grace period ends.
        "shareProcessNamespace": True,
        "terminationGracePeriodSeconds": drain_timeout_s(spec) + GRACE_BEYOND_DRAIN_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": NOBODY,
            "runAsGroup": NOBODY,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {
                "name": _PODINFO,
                "downwardAPI": {"items": [{"path": "annotations", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.annotations"}}]},
            },
            {"name": _SCRATCH, "emptyDir": {}},
            *(v.model_dump(by_alias=True, exclude_none=True) for v in template.volumes or ()),
        ],
        **_present(
            nodeSelector=dict(template.node_selector or {}),
            tolerations=[t.model_dump(by_alias=True, exclude_none=True) for t in template.tolerations or ()],
            affinity=dict(template.affinity or {}),
            serviceAccountName=template.service_account_name,
            priorityClassName=template.priority_class_name,
            imagePullSecrets=[s.model_dump(by_alias=True) for s in template.image_pull_secrets or ()],
        ),
    }


def _container(
    namespace: str, service: str, spec: InferenceServiceSpec, revision: str, role: str, role_spec: RoleSpec, template: PodTemplate, defaults: Defaults
) -> dict[str, Any]:
    return {
        "name": CONTAINER,
        "image": template.image or defaults.runtime_image,
        "imagePullPolicy": template.image_pull_policy or defaults.image_pull_policy,
        "command": ["radixfleet-runtime"],
        "args": runtime_launch(namespace, service, spec, revision, role).to_argv(),
        "envFrom": [{"configMapRef": {"name": names.revision_object_name(service, revision)}}],
        "env": [
            _field_env(names.ENV_POD_UID, "metadata.uid"),
            _field_env(names.ENV_POD_NAME, "metadata.name"),
            _field_env(names.ENV_NAMESPACE, "metadata.namespace"),
            _field_env(names.ENV_POD_IP, "status.podIP"),
            *({"name": e.name, "value": e.value or ""} for e in template.env or ()),
        ],
        "ports": _ports(role),
        "startupProbe": _probe("/readyz", period_s=2, timeout_s=2, failures=900),
        "readinessProbe": _probe("/readyz", period_s=2, timeout_s=5, failures=2),
        # Silence of 45 s: at 5 s a node with ten programs for each CPU killed workers that only waited for it. What answers is judged in 15 s.
        "livenessProbe": _probe("/livez", period_s=5, timeout_s=15, failures=3),
        "terminationMessagePath": names.TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": _PODINFO, "mountPath": names.PODINFO_DIR, "readOnly": True},
            {"name": _SCRATCH, "mountPath": names.SCRATCH_DIR},
            *(m.model_dump(by_alias=True, exclude_none=True) for m in template.volume_mounts or ()),
        ],
        **_present(resources=_resources(role_spec.resources)),
    }


def _ports(role: str) -> list[dict[str, Any]]:
    ports = {"data": names.RUNTIME_DATA_PORT, "internal": names.RUNTIME_INTERNAL_PORT, "load": names.RUNTIME_LOAD_PORT}
    ports |= {"events": names.RUNTIME_EVENTS_PORT, "replay": names.RUNTIME_REPLAY_PORT}
    if role != names.ROLE_DECODE:
        ports |= {"bootstrap": names.RUNTIME_BOOTSTRAP_PORT, "transfer": names.RUNTIME_TRANSFER_PORT}
    return [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()]


def _probe(path: str, *, period_s: int, timeout_s: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": "internal", "scheme": "HTTP"},
        "periodSeconds": period_s,
        "timeoutSeconds": timeout_s,
        "failureThreshold": failures,
    }


def _field_env(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def _resources(resources: Resources | None) -> dict[str, Any]:
    if resources is None:
        return {}
    return _present(requests=dict(resources.requests or {}), limits=dict(resources.limits or {}))


def _present(**fields: Any) -> dict[str, Any]:
    """The fields that are not empty: an empty map would be ours to own for no purpose."""
    return {name: value for name, value in fields.items() if value}
