"""Every name that two rooms share: API group, labels, annotations, ports, headers, environment, paths.

Source: docs/contract.md. A name changes here, on both sides and in the docs in one commit.
"""

from __future__ import annotations

import hashlib
from typing import Final

API_GROUP: Final = "radixfleet.io"
API_VERSION: Final = "v1alpha1"
KIND: Final = "InferenceService"
PLURAL: Final = "inferenceservices"
SHORT_NAME: Final = "infsvc"
CATEGORY: Final = "radixfleet"
FIELD_MANAGER: Final = "radixfleet-operator"

# Roles of a worker, and the letter each has in a StatefulSet's name.
ROLE_PREFILL: Final = "prefill"
ROLE_DECODE: Final = "decode"
ROLE_UNIFIED: Final = "unified"
ROLES: Final = (ROLE_PREFILL, ROLE_DECODE, ROLE_UNIFIED)
ROLE_LETTERS: Final = {ROLE_PREFILL: "p", ROLE_DECODE: "d", ROLE_UNIFIED: "u"}

# Kinds of engine that a worker can be.
ENGINE_OURS: Final = "radixfleet"
ENGINE_VLLM: Final = "vllm"
ENGINE_SGLANG: Final = "sglang"
ENGINES: Final = (ENGINE_OURS, ENGINE_VLLM, ENGINE_SGLANG)

# Labels.
LABEL_NAME: Final = "app.kubernetes.io/name"
LABEL_COMPONENT: Final = "app.kubernetes.io/component"
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
LABEL_VERSION: Final = "app.kubernetes.io/version"
LABEL_SERVICE: Final = "radixfleet.io/service"
LABEL_ROLE: Final = "radixfleet.io/role"
LABEL_REVISION: Final = "radixfleet.io/revision"
LABEL_GROUP: Final = "radixfleet.io/group"
APP_NAME: Final = "radixfleet"
COMPONENT_OPERATOR: Final = "operator"
COMPONENT_ROUTER: Final = "router"
COMPONENT_WORKER: Final = "worker"
MANAGED_BY: Final = "radixfleet-operator"

# Annotations.
ANNOTATION_DRAIN: Final = "radixfleet.io/drain"  # on a StatefulSet: {"replicas": N, "deadline": RFC 3339}
ANNOTATION_DRAINING: Final = "radixfleet.io/draining"  # on a pod: RFC 3339 UTC deadline

# Ports inside a pod. A worker's per-rank ports are base + rank.
ROUTER_DATA_PORT: Final = 8000
ROUTER_CONTROL_PORT: Final = 8001
ROUTER_PEER_PORT: Final = 8002
ROUTER_SERVICE_PORT: Final = 80
ROUTER_SERVICE_NAME: Final = "radixfleet-router"
RUNTIME_DATA_PORT: Final = 8000
RUNTIME_INTERNAL_PORT: Final = 8001
RUNTIME_BOOTSTRAP_PORT: Final = 8998
RUNTIME_TRANSFER_PORT: Final = 8999
RUNTIME_EVENTS_PORT: Final = 5557
RUNTIME_REPLAY_PORT: Final = 5657
RUNTIME_LOAD_PORT: Final = 5757
OPERATOR_HEALTH_PORT: Final = 8080
SYSTEM_NAMESPACE: Final = "radixfleet-system"

# Environment of a worker pod.
ENV_SERVICE: Final = "RADIXFLEET_SERVICE"
ENV_POD_UID: Final = "RADIXFLEET_POD_UID"
ENV_POD_NAME: Final = "RADIXFLEET_POD_NAME"
ENV_NAMESPACE: Final = "RADIXFLEET_NAMESPACE"
ENV_POD_IP: Final = "RADIXFLEET_POD_IP"
ENV_WORKER_KEY: Final = "RADIXFLEET_WORKER_KEY"  # variables of the router that begin so may hold API keys of other engines' workers
ENV_MODELS: Final = "RADIXFLEET_MODELS"  # folder of bundled models, when it is not BUNDLED_MODELS_DIR
ENV_COMPILED: Final = "RADIXFLEET_COMPILED"  # 0: the router runs interpreted

# Paths in a pod.
BUNDLED_MODELS_DIR: Final = "/opt/radixfleet/models"
NATIVE_LIBRARY_DIR: Final = "/opt/radixfleet/native"  # compiled libraries of the native executor
COMPILED_DIR: Final = "/opt/radixfleet/compiled"  # builds of the router's compiled modules
PODINFO_DIR: Final = "/etc/podinfo"
PODINFO_ANNOTATIONS: Final = "/etc/podinfo/annotations"  # downward-API file, one key="value" a line
SCRATCH_DIR: Final = "/run/radixfleet"  # the one writable folder, HOME and TMPDIR; not /tmp, which may hold what is mounted from the node
TERMINATION_LOG: Final = "/dev/termination-log"
ENV_TERMINATION_LOG: Final = "RADIXFLEET_TERMINATION_LOG"  # another file for the cause of a failed start, where there is no pod

# Causes of a failed start, in the termination message {"reason", "message"}.
START_FAILURES: Final = ("ModelNotFound", "ModelInvalid", "OutOfMemory", "BadFlag", "PortInUse", "CacheUnwritable", "Internal")

# Headers, router -> runtime (internal port only).
HEADER_REQUEST_ID: Final = "X-Request-Id"
HEADER_PREFIX: Final = "X-Radixfleet-"
HEADER_RID: Final = "X-Radixfleet-Rid"  # 32 hex, new for each attempt, the same on both legs
HEADER_PICK: Final = "X-Radixfleet-Pick"  # <routerId>:<n>
HEADER_DEADLINE_MS: Final = "X-Radixfleet-Deadline-Ms"  # relative, until the first token
HEADER_LEG: Final = "X-Radixfleet-Leg"  # prefill | decode
HEADER_ROOM: Final = "X-Radixfleet-Room"  # decimal < 2**63, one per choice, repeated
HEADER_BOOTSTRAP: Final = "X-Radixfleet-Bootstrap"  # host:port
HEADER_PREFILL_INCARNATION: Final = "X-Radixfleet-Prefill-Incarnation"  # 16 hex
HEADER_JSON_LENGTH: Final = "X-Radixfleet-Json-Length"
HEADER_MODEL_REVISION: Final = "X-Radixfleet-Model-Revision"
CONTENT_TYPE_IDS: Final = "application/vnd.radixfleet.ids"

# Headers, client -> router, and router -> client.
HEADER_PRIORITY_CLASS: Final = "X-Priority-Class"
HEADER_TOLD_WORKER: Final = "X-Router-Worker"  # who gives the answer
HEADER_TOLD_HITS: Final = "X-Router-Hit-Tokens"  # what it should have cached of the prompt
HEADER_TOLD_KEYS: Final = "X-Router-Keys"  # what it compares prompts by: tokens, bytes, or none
HEADER_TOLD_QUEUE: Final = "X-Router-Queue-Ms"  # how long the request waited because all were busy
PRIORITY_CLASSES: Final = ("system", "interactive", "default", "batch")  # highest first

PAGE_SIZE: Final = 16  # tokens

FINISH_REASONS: Final = ("stop", "length", "tool_calls", "content_filter", "abort", "error")
WORKER_STATES: Final = ("starting", "ready", "draining", "stalled", "failed")

MAX_SERVICE_NAME_IN_CHILD: Final = 38


def child_service_name(service: str) -> str:
    """The service's part of its children's names: whole up to 38 characters, else 29 + '-' + 8 hex digits of its hash.

    A StatefulSet's controller adds 11 characters in a label whose limit is 63, and we add revision, role and group.
    """
    if len(service) <= MAX_SERVICE_NAME_IN_CHILD:
        return service
    return f"{service[:29]}-{hashlib.sha256(service.encode()).hexdigest()[:8]}"


def workload_name(service: str, revision: str, role: str, group: int = 0) -> str:
    """Name of the StatefulSet of one revision, role and group: `<svc>-<rev>-<p|d|u>[group]`."""
    return f"{child_service_name(service)}-{revision}-{ROLE_LETTERS[role]}{group or ''}"


def revision_object_name(service: str, revision: str) -> str:
    """Name of what a revision has once: headless Service, ConfigMap, ControllerRevision."""
    return f"{child_service_name(service)}-{revision}"
