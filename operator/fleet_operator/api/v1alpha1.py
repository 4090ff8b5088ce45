"""`InferenceService` of radixfleet.io/v1alpha1, field by field; `fleet_operator.crds` turns it into the CRD.

Descriptions are what `kubectl explain` prints. Rules are CEL with a message for humans (`x-kubernetes-validations`), so they hold
while the operator is down. No schema defaults: a default is filled in by the operator and pinned per revision, so that a later
operator's other default changes no live service. `null` is dropped by the
API server and so means absent everywhere.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel

from fleet_contract import names
from fleet_contract.launch import USER_FLAGS
from fleet_operator.api import quantity

MAX_REPLICAS: Final = 1000
# What no podTemplate may set: ours by name, so that a pod can always be found, probed and drained.
RESERVED_PREFIX: Final = "radixfleet.io/"
RESERVED_LABEL_PREFIX: Final = "app.kubernetes.io/"
RESERVED_ENV_PREFIX: Final = "RADIXFLEET_"
RESERVED_ENV: Final = ("HOME", "TMPDIR", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE")
RESERVED_VOLUME_PREFIX: Final = "radixfleet-"
RESERVED_MOUNTS: Final = (names.SCRATCH_DIR, names.PODINFO_DIR)


def rule(rule: str, message: str, *, expression: str = "", reason: str = "FieldValueInvalid", path: str = "") -> dict[str, str]:
    """One CEL rule; `expression` (CEL) makes the message when it must show what we got, `message` stays the fallback."""
    out = {"rule": rule, "message": message, "reason": reason}
    if expression:
        out["messageExpression"] = expression
    if path:
        out["fieldPath"] = path
    return out


def _schema(*rules: dict[str, str], **more: Any) -> dict[str, Any]:
    return ({"x-kubernetes-validations": list(rules)} if rules else {}) | more


class Model(BaseModel):
    """Base of all: camelCase in YAML, unknown fields of a newer CRD ignored, never changed after parsing."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True, protected_namespaces=())


QuantityText = Annotated[str, BeforeValidator(lambda v: str(v) if isinstance(v, int) else v)]
Name253 = Annotated[str, Field(min_length=1, max_length=253)]
QUANTITY_SCHEMA: Final[dict[str, Any]] = {
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "pattern": quantity.PATTERN,
    "x-kubernetes-int-or-string": True,
}


class Resources(Model):
    """Compute resources of one worker's container."""

    requests: dict[str, QuantityText] | None = Field(
        default=None,
        description="What the scheduler reserves for a worker, by resource name: cpu, memory, nvidia.com/gpu, ...",
        json_schema_extra={"maxProperties": 16, "additionalProperties": QUANTITY_SCHEMA},
    )
    limits: dict[str, QuantityText] | None = Field(
        default=None,
        description="The most that a worker may use, by resource name.",
        json_schema_extra={"maxProperties": 16, "additionalProperties": QUANTITY_SCHEMA},
    )


class Toleration(Model):
    """One taint that the pods may stand, as in a Pod."""

    key: Name253 | None = Field(default=None, description="Taint key; empty with operator Exists: every taint.")
    operator: Literal["Exists", "Equal"] | None = Field(default=None, description="How value is compared; default Equal.")
    value: Annotated[str, Field(max_length=63)] | None = Field(default=None, description="Taint value to equal.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(default=None, description="Effect to match; empty: all.")
    toleration_seconds: int | None = Field(default=None, description="Seconds a NoExecute taint is stood; empty: for ever.")


class EnvVar(Model):
    """One environment variable with a plain value."""

    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] = Field(description="Name of the variable.")
    value: Annotated[str, Field(max_length=4096)] | None = Field(default=None, description="Its value; empty when left out.")


class PvcSource(Model):
    """A PersistentVolumeClaim of the service's namespace."""

    claim_name: Name253 = Field(description="Name of the claim.")
    read_only: bool | None = Field(default=None, description="Attach it read-only.")


class NamedSource(Model):
    """A ConfigMap of the service's namespace."""

    name: Name253 = Field(description="Name of the ConfigMap.")


class SecretSource(Model):
    """A Secret of the service's namespace."""

    secret_name: Name253 = Field(description="Name of the Secret; it is read by the pod, never by the operator.")


class EmptyDirSource(Model):
    """A folder that lives as long as the pod."""

    medium: Literal["", "Memory"] | None = Field(default=None, description="Memory: a tmpfs; empty: the node's disk.")
    size_limit: QuantityText | None = Field(default=None, description="Most bytes it may hold.", json_schema_extra=dict(QUANTITY_SCHEMA))


class HostPathSource(Model):
    """A path of the node; namespaces with Pod Security level baseline or restricted refuse it."""

    path: Annotated[str, Field(min_length=1, max_length=1024, pattern="^/")] = Field(description="Absolute path on the node.")
    type: Literal["", "Directory", "DirectoryOrCreate", "File", "FileOrCreate"] | None = Field(default=None, description="Check made first.")


_ONE_SOURCE: Final = rule(
    "[has(self.persistentVolumeClaim), has(self.configMap), has(self.secret), has(self.emptyDir), has(self.hostPath)].filter(x, x).size() == 1",
    "a volume needs exactly one of persistentVolumeClaim, configMap, secret, emptyDir, hostPath",
)


class Volume(Model):
    """A volume that volumeMounts may name."""

    model_config = ConfigDict(json_schema_extra=_schema(_ONE_SOURCE))
    name: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")] = Field(description="Name of the volume.")
    persistent_volume_claim: PvcSource | None = Field(default=None, description="A claim, for example one that holds models for file:// URIs.")
    config_map: NamedSource | None = Field(default=None, description="The files of a ConfigMap.")
    secret: SecretSource | None = Field(default=None, description="The files of a Secret.")
    empty_dir: EmptyDirSource | None = Field(default=None, description="An empty folder.")
    host_path: HostPathSource | None = Field(default=None, description="A path of the node.")


class VolumeMount(Model):
    """Where a volume appears in the worker's container."""

    name: Annotated[str, Field(min_length=1, max_length=63)] = Field(description="Name of a volume in volumes.")
    mount_path: Annotated[str, Field(min_length=1, max_length=1024, pattern="^/")] = Field(description="Absolute path in the container.")
    sub_path: Annotated[str, Field(max_length=1024)] | None = Field(default=None, description="Folder of the volume to mount; empty: its root.")
    read_only: bool | None = Field(default=None, description="Mount it read-only.")


class LocalReference(Model):
    """A name in the service's namespace."""

    name: Name253 = Field(description="Name of the Secret.")


_RESERVED_MOUNT_LIST: Final = "[" + ", ".join(f"'{m}'" for m in RESERVED_MOUNTS) + "]"
_RESERVED_ENV_LIST: Final = "[" + ", ".join(f"'{m}'" for m in RESERVED_ENV) + "]"


class PodTemplate(Model):
    """What of the pods may be set. Command, arguments, ports, probes, selector labels and security context are ours."""

    labels: dict[str, Annotated[str, Field(max_length=63)]] | None = Field(
        default=None,
        description="Extra labels of the pods. Labels under radixfleet.io/ and app.kubernetes.io/ are the operator's.",
        json_schema_extra=_schema(
            rule(
                f"self.all(k, !k.startsWith('{RESERVED_PREFIX}') && !k.startsWith('{RESERVED_LABEL_PREFIX}'))",
                "labels under radixfleet.io/ and app.kubernetes.io/ belong to the operator; choose another prefix",
            ),
            maxProperties=32,
        ),
    )
    annotations: dict[str, Annotated[str, Field(max_length=4096)]] | None = Field(
        default=None,
        description="Extra annotations of the pods. Annotations under radixfleet.io/ are the operator's.",
        json_schema_extra=_schema(
            rule(
                f"self.all(k, !k.startsWith('{RESERVED_PREFIX}'))",
                "annotations under radixfleet.io/ belong to the operator; choose another prefix",
            ),
            maxProperties=32,
        ),
    )
    image: Annotated[str, Field(min_length=1, max_length=512)] | None = Field(
        default=None, description="Image of the worker; default: the runtime image that the chart was installed with."
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        default=None, description="When the image is pulled; default: the chart's imagePullPolicy."
    )
    image_pull_secrets: Annotated[list[LocalReference], Field(max_length=8)] | None = Field(
        default=None, description="Secrets to pull the image with."
    )
    env: Annotated[list[EnvVar], Field(max_length=64)] | None = Field(
        default=None,
        description="Extra environment of the worker. Names that begin with RADIXFLEET_ are the operator's.",
        json_schema_extra=_schema(
            rule(
                f"self.all(e, !e.name.startsWith('{RESERVED_ENV_PREFIX}') && !(e.name in {_RESERVED_ENV_LIST}))",
                f"variables named RADIXFLEET_*, {', '.join(RESERVED_ENV)} belong to the operator; set flags by engine.args",
            ),
            rule("self.all(e, self.exists_one(o, o.name == e.name))", "env names a variable twice; name each once"),
        ),
    )
    node_selector: dict[str, Annotated[str, Field(max_length=63)]] | None = Field(
        default=None, description="Labels that a node must have.", json_schema_extra={"maxProperties": 32}
    )
    tolerations: Annotated[list[Toleration], Field(max_length=32)] | None = Field(default=None, description="Taints that the pods stand.")
    affinity: dict[str, Any] | None = Field(
        default=None,
        description="nodeAffinity, podAffinity and podAntiAffinity as in a Pod's spec.affinity.",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    )
    service_account_name: Name253 | None = Field(default=None, description="Service account of the pods. Its token is not mounted.")
    priority_class_name: Name253 | None = Field(default=None, description="Priority class of the pods.")
    volumes: Annotated[list[Volume], Field(max_length=16)] | None = Field(
        default=None,
        description="Volumes for volumeMounts, for example the claim that holds the model of a file:// URI.",
        json_schema_extra=_schema(
            rule(
                f"self.all(v, !v.name.startsWith('{RESERVED_VOLUME_PREFIX}'))",
                "volume names that begin with radixfleet- belong to the operator; choose another name",
            ),
            rule("self.all(v, self.exists_one(o, o.name == v.name))", "volumes has a name twice; name each once"),
        ),
    )
    volume_mounts: Annotated[list[VolumeMount], Field(max_length=16)] | None = Field(
        default=None,
        description="Where the volumes appear in the worker.",
        json_schema_extra=_schema(
            rule(
                f"self.all(m, !(m.mountPath in {_RESERVED_MOUNT_LIST}))",
                f"{' and '.join(RESERVED_MOUNTS)} are the operator's mounts; choose another mountPath",
            ),
            rule("self.all(m, self.exists_one(o, o.mountPath == m.mountPath))", "volumeMounts has a mountPath twice; use each once"),
        ),
    )

    model_config = ConfigDict(
        json_schema_extra=_schema(
            rule(
                "!has(self.volumeMounts) || self.volumeMounts.all(m, has(self.volumes) && self.volumes.exists(v, v.name == m.name))",
                "volumeMounts names a volume that volumes does not have",
            )
        )
    )


class RoleSpec(Model):
    """The workers of one role."""

    replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] | None = Field(default=None, description="Number of workers; default 1.")
    resources: Resources | None = Field(default=None, description="Compute resources of each worker.")
    pod_template: PodTemplate | None = Field(default=None, description="What else of the pods may be set.")

    def wanted_replicas(self) -> int:
        """Replicas with the default filled in."""
        return 1 if self.replicas is None else self.replicas


class ModelSpec(Model):
    """The model and the name it is served by."""

    uri: Annotated[str, Field(min_length=1, max_length=1024)] = Field(
        description="Where the model is: bundled://NAME (in the runtime image), file:///PATH (a folder in the worker, see podTemplate.volumes)"
        " or simulated:// (no model: the simulated executor).",
        json_schema_extra=_schema(
            rule(
                r"self.matches('^(bundled://[a-z0-9][a-z0-9._-]*|file:///.+|simulated://[a-z0-9._-]*)$')",
                "model.uri must be bundled://NAME, file:///ABSOLUTE/PATH or simulated://",
                expression="'model.uri must be bundled://NAME, file:///ABSOLUTE/PATH or simulated://, not '"
                " + (self.size() > 100 ? self.substring(0, 100) + '...' : self)",
            ),
            rule("!self.contains('/../') && !self.endsWith('/..')", "model.uri may not contain '..'; write the folder's full path"),
        ),
    )
    name: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(
        default=None,
        description="Name that clients send as `model`; default: metadata.name. <namespace>/<metadata.name> works always."
        " When two services have the same name, it belongs to the older one.",
        json_schema_extra=_schema(
            rule(
                r"self.matches('^[A-Za-z0-9]([A-Za-z0-9._:@/-]*[A-Za-z0-9])?$')",
                "model.name may have letters, digits and . _ : @ / - between them, and must begin and end with a letter or digit",
            )
        ),
    )


class KvCacheSpec(Model):
    """The KV cache of each worker."""

    memory: Annotated[str, Field(min_length=1, max_length=32)] | None = Field(
        default=None,
        description="Memory for KV pages of each worker, as a quantity; default 1Gi. Count it into resources.",
        json_schema_extra=_schema(
            rule("isQuantity(self)", "kvCache.memory must be a quantity like 512Mi or 2Gi"),
            rule(
                "!isQuantity(self) || (quantity(self).compareTo(quantity('1Mi')) >= 0 && quantity(self).compareTo(quantity('16Ti')) <= 0)",
                "kvCache.memory must be between 1Mi and 16Ti",
                expression="'kvCache.memory must be between 1Mi and 16Ti, not ' + self",
            ),
        ),
    )


_FLAG_LIST: Final = "[" + ", ".join(f"'{f}'" for f in USER_FLAGS) + "]"


class EngineSpec(Model):
    """The engine, the same for all roles; becomes the runtime's flags."""

    context_length: Annotated[int, Field(ge=16, le=1_048_576)] | None = Field(
        default=None, description="Longest prompt plus answer, in tokens; default 4096."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = Field(
        default=None, description="Type of weights and KV; auto (the default) is bfloat16 with the native executor, else float32."
    )
    kv_cache: KvCacheSpec | None = Field(default=None, description="The KV cache of each worker.")
    args: dict[str, Annotated[str, Field(max_length=256)]] | None = Field(
        default=None,
        description="Other flags of radixfleet-runtime, without the dashes in front; values are strings, so quote numbers."
        f" Allowed: {', '.join(USER_FLAGS)}.",
        json_schema_extra=_schema(
            rule(
                f"self.all(k, k in {_FLAG_LIST})",
                f"engine.args names a flag that does not exist; allowed: {', '.join(USER_FLAGS)}",
                expression=f"'engine.args names a flag that does not exist: ' + self.filter(k, !(k in {_FLAG_LIST}))[0]"
                f" + '; allowed: {', '.join(USER_FLAGS)}'",
            ),
            maxProperties=64,
        ),
    )


class DrainSpec(Model):
    """How a worker that is to go is emptied first."""

    timeout_seconds: Annotated[int, Field(ge=0, le=86_400)] | None = Field(
        default=None, description="Most seconds that a worker's running requests get before it is stopped; default 300."
    )


_U, _P, _D = "has(self.unified)", "has(self.prefill)", "has(self.decode)"


def _replicas(role: str) -> str:
    return f"(has({role}.replicas) ? {role}.replicas : 1)"


_EXECUTOR: Final = "self.engine.args['executor']"
_HAS_EXECUTOR: Final = "(has(self.engine) && has(self.engine.args) && 'executor' in self.engine.args)"


class InferenceServiceSpec(Model):
    """A model served by a fleet of workers: either unified ones, or prefill and decode ones."""

    model_config = ConfigDict(
        json_schema_extra=_schema(
            rule(
                f"({_U}) ? !({_P}) && !({_D}) : ({_P}) && ({_D})",
                "set either spec.unified, or both spec.prefill and spec.decode",
                expression="'set either spec.unified, or both spec.prefill and spec.decode; got '"
                f" + ({_U} ? (({_P} || {_D}) ? 'unified and ' : 'unified') : '')"
                f" + ({_P} ? ({_D} ? 'prefill and decode' : 'prefill') : ({_D} ? 'decode' : ''))"
                f" + (!{_U} && !{_P} && !{_D} ? 'none of them' : '')",
            ),
            rule(
                f"!(({_P}) && ({_D})) || ({_replicas('self.prefill')} == 0) == ({_replicas('self.decode')} == 0)",
                "prefill.replicas and decode.replicas must both be 0 or both be above 0: one role alone serves nothing; change both in one apply",
            ),
            rule(
                f"!{_HAS_EXECUTOR} || ({_EXECUTOR} == 'simulated') == self.model.uri.startsWith('simulated://')",
                "engine.args.executor simulated and model.uri simulated:// go together: set both or neither",
            ),
        )
    )
    model: ModelSpec = Field(description="The model and the name it is served by.")
    engine: EngineSpec | None = Field(default=None, description="The engine, the same for all roles.")
    unified: RoleSpec | None = Field(default=None, description="Workers that do both prefill and decode. Instead of prefill and decode.")
    prefill: RoleSpec | None = Field(default=None, description="Workers that compute prompts and hand their KV over. Needs decode.")
    decode: RoleSpec | None = Field(default=None, description="Workers that take over after the prompt and generate. Needs prefill.")
    drain: DrainSpec | None = Field(default=None, description="How a worker that is to go is emptied first.")

    def roles(self) -> dict[str, RoleSpec]:
        """The roles that are set, in a fixed order."""
        found = {names.ROLE_PREFILL: self.prefill, names.ROLE_DECODE: self.decode, names.ROLE_UNIFIED: self.unified}
        return {role: spec for role, spec in found.items() if spec is not None}


class Condition(Model):
    """One answer about the service."""

    type: Annotated[str, Field(max_length=64)] = Field(description="What is asked, for example Available.")
    status: Literal["True", "False", "Unknown"] = Field(description="The answer.")
    reason: Annotated[str, Field(max_length=64)] = Field(description="The cause as one CamelCase word, for programs.")
    message: Annotated[str, Field(max_length=4096)] = Field(description="The cause and the next step, for humans.")
    last_transition_time: str = Field(description="When status last changed.", json_schema_extra={"format": "date-time"})
    observed_generation: int = Field(description="metadata.generation that the answer is about.")


class RoleStatus(Model):
    """Counts of one role; ready and updated count pods of the target revision only."""

    desired: int = Field(description="Workers asked for.")
    ready: int = Field(description="Ready pods of the target revision.")
    updated: int = Field(description="Pods of the target revision, ready or not.")


class Traffic(Model):
    """The share of new requests of one revision."""

    revision: str = Field(description="Name of the revision.")
    weight: Annotated[int, Field(ge=0, le=100)] = Field(description="Per cent of new requests.")


class Summary(Model):
    """Texts for the columns of `kubectl get`."""

    ready: str = Field(description="Ready of desired workers, all roles.")
    prefill: str | None = Field(default=None, description="Ready of desired prefill workers.")
    decode: str | None = Field(default=None, description="Ready of desired decode workers.")


class InferenceServiceStatus(Model):
    """What the operator observes. Derived anew on each look: losing it changes nothing."""

    observed_generation: int | None = Field(default=None, description="metadata.generation that this status is about.")
    url: str | None = Field(default=None, description="Base URL of the OpenAI API, inside the cluster.")
    revision: str | None = Field(default=None, description="Revision that the spec asks for, 8 hex digits.")
    roles: dict[str, RoleStatus] | None = Field(default=None, description="Counts by role.")
    traffic: list[Traffic] | None = Field(default=None, description="Which revisions get new requests; routers follow it.")
    summary: Summary | None = Field(default=None, description="Texts for the columns of kubectl get.")
    conditions: list[Condition] | None = Field(
        default=None,
        description="Available: can I call it now? Progressing: is it changing? Ready: available and all of the target revision?"
        " The others are parts of the answer.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )


_NAME_OK: Final = "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')"
ROOT_RULES: Final = [
    rule("self.metadata.name.size() <= 63", "metadata.name may have 63 characters at most"),
    rule(
        f"self.metadata.name.size() > 63 || {_NAME_OK}",
        "metadata.name must be a lower-case letter, then letters, digits and '-', with no '-' at the end: Services are named after it",
    ),
]  # fmt: skip
PRINTER_COLUMNS: Final = [
    ("Model", "string", ".spec.model.uri", "Where the model is"),
    ("Ready", "string", ".status.summary.ready", "Ready of desired workers"),
    ("Prefill", "string", ".status.summary.prefill", "Ready of desired prefill workers"),
    ("Decode", "string", ".status.summary.decode", "Ready of desired decode workers"),
    ("Revision", "string", ".status.revision", "Revision that the spec asks for"),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', "Why it is ready or not"),
    ("URL", "string", ".status.url", "Base URL of the OpenAI API"),
    ("Age", "date", ".metadata.creationTimestamp", "Time since it was created"),
]
