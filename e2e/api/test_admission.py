"""Good and bad InferenceServices before a real API server: the CRD alone must say what is wrong; the operator is not asked."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from fleet_contract import names
from fleet_contract.launch import USER_FLAGS
from fleet_local.api import ClusterClient
from fleet_local.install import checkout
from fleet_testing.fleet import Fleet

pytestmark = pytest.mark.e2e

UNIFIED: dict[str, Any] = {"model": {"uri": "simulated://"}, "unified": {}}
PAIR: dict[str, Any] = {"model": {"uri": "bundled://smollm2-135m-instruct"}, "prefill": {}, "decode": {}}
EITHER = "spec: Invalid value: set either spec.unified, or both spec.prefill and spec.decode; got "
URI = "model.uri must be bundled://NAME, file:///ABSOLUTE/PATH or simulated://, not "
NAME = "model.name may have letters, digits and . _ : @ / - between them, and must begin and end with a letter or digit"
CR_NAME = "metadata.name must be a lower-case letter, then letters, digits and '-', with no '-' at the end: Services are named after it"
ZERO = "prefill.replicas and decode.replicas must both be 0 or both be above 0: one role alone serves nothing; change both in one apply"
EXECUTOR = "engine.args.executor simulated and model.uri simulated:// go together: set both or neither"
ARGS = f"; allowed: {', '.join(USER_FLAGS)}"
NO_FLAG = "engine.args names a flag that does not exist"
LABELS = "labels under radixfleet.io/ and app.kubernetes.io/ belong to the operator; choose another prefix"
ENV = "variables named RADIXFLEET_*, HOME, TMPDIR, PYTHONUNBUFFERED, PYTHONDONTWRITEBYTECODE belong to the operator; set flags by engine.args"
SOURCE = "a volume needs exactly one of persistentVolumeClaim, configMap, secret, emptyDir, hostPath"


def unified(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(UNIFIED), **changes}


def pod(**template: Any) -> dict[str, Any]:
    return unified(unified={"podTemplate": template})


def engine(**fields: Any) -> dict[str, Any]:
    return unified(engine=fields)


GOOD: dict[str, tuple[str, dict[str, Any]]] = {
    "the smallest unified service": ("a", UNIFIED),
    "the smallest pair": ("a", PAIR),
    "a name of 63 characters": ("a" * 63, UNIFIED),
    "a name with digits and dashes": ("a-1-b2", UNIFIED),
    "null is absent": ("a", {**PAIR, "unified": None, "engine": {"args": None, "dtype": None, "kvCache": None}, "drain": None}),
    "null inside a role": ("a", unified(unified={"replicas": None, "resources": None, "podTemplate": None})),
    "empty objects": ("a", unified(engine={}, drain={}, unified={"podTemplate": {}, "resources": {}})),
    "a file model with a claim": (
        "a",
        {
            "model": {"uri": "file:///models/llama"},
            "unified": {
                "podTemplate": {
                    "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}],
                    "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
                }
            },
        },
    ),
    "a served name as hubs write it": ("a", unified(model={"uri": "simulated://", "name": "org/Some-Model.v1:q4@main"})),
    "numbers for quantities": ("a", unified(unified={"resources": {"requests": {"cpu": 1, "memory": "1Gi"}, "limits": {"nvidia.com/gpu": 1}}})),
    "both roles off": ("a", {**PAIR, "prefill": {"replicas": 0}, "decode": {"replicas": 0}}),
    "every flag by name": ("a", engine(args=dict.fromkeys(USER_FLAGS, "1") | {"executor": "simulated"})),
    "the least and the most of numbers": ("a", engine(contextLength=16, kvCache={"memory": "1Mi"}) | {"drain": {"timeoutSeconds": 0}}),
    "all of a pod template": (
        "a",
        pod(
            labels={"team": "x"},
            annotations={"note": "y"},
            image="registry/runtime:1",
            imagePullPolicy="Always",
            imagePullSecrets=[{"name": "pull"}],
            env=[{"name": "A", "value": "b"}, {"name": "EMPTY"}],
            nodeSelector={"disk": "ssd"},
            tolerations=[{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
            affinity={"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}},
            serviceAccountName="sa",
            priorityClassName="high",
            volumes=[{"name": "scratch", "emptyDir": {"sizeLimit": "1Gi"}}],
            volumeMounts=[{"name": "scratch", "mountPath": "/scratch"}],
        ),
    ),
}

BAD: dict[str, tuple[str, dict[str, Any] | None, str]] = {
    "no spec": ("a", None, "spec: Required value"),
    "an empty spec": ("a", {}, "spec.model: Required value"),
    "no model": ("a", {"unified": {}}, "spec.model: Required value"),
    "no role": ("a", {"model": UNIFIED["model"]}, EITHER + "none of them"),
    "prefill alone": ("a", {"model": UNIFIED["model"], "prefill": {}}, EITHER + "prefill"),
    "decode alone": ("a", {"model": UNIFIED["model"], "decode": {}}, EITHER + "decode"),
    "unified and prefill": ("a", unified(prefill={}), EITHER + "unified and prefill"),
    "all three": ("a", {**PAIR, "unified": {}}, EITHER + "unified and prefill and decode"),
    "a name of 64 characters": ("a" * 64, UNIFIED, "metadata.name may have 63 characters at most"),
    "a name with a dot": ("a.b", UNIFIED, CR_NAME),
    "a name that begins with a digit": ("1a", UNIFIED, CR_NAME),
    "a URI of a hub": ("a", unified(model={"uri": "hf://org/model"}), f'spec.model.uri: Invalid value: "hf://org/model": {URI}hf://org/model'),
    "a bare path": ("a", unified(model={"uri": "/models/x"}), URI + "/models/x"),
    "a relative file": ("a", unified(model={"uri": "file://models/x"}), URI + "file://models/x"),
    "a path with dots": ("a", unified(model={"uri": "file:///models/../etc"}), "model.uri may not contain '..'; write the folder's full path"),
    "an empty URI": ("a", unified(model={"uri": ""}), "spec.model.uri in body should be at least 1 chars long"),
    "a URI of 1025 characters": ("a", unified(model={"uri": "file:///" + "a" * 1017}), "spec.model.uri: Too long: may not be more than 1024 bytes"),
    "a number for a URI": ("a", unified(model={"uri": 5}), "spec.model.uri in body must be of type string"),
    "a served name with a space": ("a", unified(model={"uri": "simulated://", "name": "a b"}), f'spec.model.name: Invalid value: "a b": {NAME}'),
    "a served name that ends with a dash": ("a", unified(model={"uri": "simulated://", "name": "a-"}), NAME),
    "a context of 15": ("a", engine(contextLength=15), "spec.engine.contextLength in body should be greater than or equal to 16"),
    "a context beyond the limit": ("a", engine(contextLength=2_000_000), "spec.engine.contextLength in body should be less than or equal to 1048576"),
    "a text for a number": ("a", engine(contextLength="2k"), "spec.engine.contextLength in body must be of type integer"),
    "an unknown dtype": ("a", engine(dtype="int4"), 'Unsupported value: "int4": supported values: "auto", "float32", "bfloat16", "float16"'),
    "memory that is no quantity": ("a", engine(kvCache={"memory": "lots"}), "kvCache.memory must be a quantity like 512Mi or 2Gi"),
    "too little memory": ("a", engine(kvCache={"memory": "1Ki"}), "kvCache.memory must be between 1Mi and 16Ti, not 1Ki"),
    "negative memory": ("a", engine(kvCache={"memory": "-1Gi"}), "kvCache.memory must be between 1Mi and 16Ti, not -1Gi"),
    "too much memory": ("a", engine(kvCache={"memory": "1Ei"}), "kvCache.memory must be between 1Mi and 16Ti, not 1Ei"),
    "a flag that does not exist": ("a", engine(args={"max-rows": "1", "no-such-flag": "1"}), f"{NO_FLAG}: no-such-flag{ARGS}"),
    "a flag of the operator": ("a", engine(args={"data-port": "1"}), f"{NO_FLAG}: data-port{ARGS}"),
    "a flag of the length of a novel": ("a", engine(args={"x" * 6000: "1"}), f"{NO_FLAG}{ARGS}"),
    "a number for a flag": ("a", engine(args={"max-rows": 8}), "spec.engine.args.max-rows in body must be of type string"),
    "the simulated executor with a model": ("a", {**PAIR, "engine": {"args": {"executor": "simulated"}}}, EXECUTOR),
    "the torch executor without a model": ("a", engine(args={"executor": "torch"}), EXECUTOR),
    "fewer than no replicas": ("a", unified(unified={"replicas": -1}), "spec.unified.replicas in body should be greater than or equal to 0"),
    "more than 1000 replicas": ("a", unified(unified={"replicas": 1001}), "spec.unified.replicas in body should be less than or equal to 1000"),
    "one role off": ("a", {**PAIR, "decode": {"replicas": 0}}, ZERO),
    "a bad quantity": (
        "a",
        unified(unified={"resources": {"requests": {"cpu": "many"}}}),
        "spec.unified.resources.requests.cpu in body should match",
    ),
    "an unknown field": ("a", unified(unified={"replica": 2}), 'unknown field "spec.unified.replica"'),
    "a command": ("a", pod(command=["sh"]), 'unknown field "spec.unified.podTemplate.command"'),
    "a security context": ("a", pod(securityContext={}), 'unknown field "spec.unified.podTemplate.securityContext"'),
    "a label of ours": ("a", pod(labels={names.LABEL_ROLE: "decode"}), LABELS),
    "a label of everybody's": ("a", pod(labels={names.LABEL_COMPONENT: "router"}), LABELS),
    "an annotation of ours": ("a", pod(annotations={names.ANNOTATION_DRAINING: "x"}), "annotations under radixfleet.io/ belong to the operator"),
    "a variable of ours": ("a", pod(env=[{"name": "RADIXFLEET_SERVICE", "value": "x"}]), ENV),
    "TMPDIR": ("a", pod(env=[{"name": "TMPDIR", "value": "/"}]), ENV),
    "a variable twice": ("a", pod(env=[{"name": "A"}, {"name": "A"}]), "env names a variable twice; name each once"),
    "a variable with a bad name": ("a", pod(env=[{"name": "1-a"}]), "env[0].name in body should match"),
    "a value of 200 KB": ("a", pod(env=[{"name": "A", "value": "x" * 200_000}]), "env[0].value: Too long: may not be more than 4096 bytes"),
    "a volume of ours": (
        "a",
        pod(volumes=[{"name": "radixfleet-tmp", "emptyDir": {}}]),
        "volume names that begin with radixfleet- belong to the operator",
    ),
    "a volume without a source": ("a", pod(volumes=[{"name": "v"}]), SOURCE),
    "a volume with two sources": ("a", pod(volumes=[{"name": "v", "emptyDir": {}, "secret": {"secretName": "s"}}]), SOURCE),
    "a mount without a volume": ("a", pod(volumeMounts=[{"name": "v", "mountPath": "/v"}]), "volumeMounts names a volume that volumes does not have"),
    "a mount over ours": (
        "a",
        pod(volumes=[{"name": "v", "emptyDir": {}}], volumeMounts=[{"name": "v", "mountPath": names.SCRATCH_DIR}]),
        "/run/radixfleet and /etc/podinfo are the operator's mounts; choose another mountPath",
    ),
    "a relative mount": (
        "a",
        pod(volumes=[{"name": "v", "emptyDir": {}}], volumeMounts=[{"name": "v", "mountPath": "v"}]),
        "volumeMounts[0].mountPath in body should match '^/'",
    ),
    "a negative drain": ("a", unified(drain={"timeoutSeconds": -1}), "spec.drain.timeoutSeconds in body should be greater than or equal to 0"),
    "a drain of more than a day": (
        "a",
        unified(drain={"timeoutSeconds": 86_401}),
        "spec.drain.timeoutSeconds in body should be less than or equal to 86400",
    ),
}


@pytest.fixture(scope="module")
def crd(cluster: ClusterClient, fleet: Fleet) -> ClusterClient:
    """A cluster with the CRD, as the chart brings it (a unit test holds it equal to crds/). Nobody but the API server takes part: no webhooks."""
    return cluster


def dry_run(cluster: ClusterClient, name: str, spec: dict[str, Any] | None) -> tuple[int, str]:
    """Exit status and everything that kubectl says; nothing is stored."""
    doc = {"apiVersion": f"{names.API_GROUP}/{names.API_VERSION}", "kind": names.KIND, "metadata": {"name": name}}
    if spec is not None:
        doc["spec"] = spec
    done = cluster.kubectl("create", "--dry-run=server", "-n", "default", "-f", "-", stdin=json.dumps(doc), check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("case", GOOD)
def test_good_services_are_accepted(crd: ClusterClient, case: str) -> None:
    code, said = dry_run(crd, *GOOD[case])
    assert code == 0, said


# The whole answer of each bad case, word for word; rewritten by `pytest e2e/api --rewrite-refusals` and read before it is committed.
REFUSALS_FILE = Path(__file__).parent / "refusals.json"


@pytest.mark.parametrize("case", BAD)
def test_bad_services_are_refused_with_what_is_wrong(crd: ClusterClient, case: str, request: pytest.FixtureRequest) -> None:
    name, spec, message = BAD[case]
    code, said = dry_run(crd, name, spec)
    assert code != 0 and message in said, said
    assert len(said) < 3000
    refusals = json.loads(REFUSALS_FILE.read_text()) if REFUSALS_FILE.exists() else {}
    if request.config.getoption("--rewrite-refusals"):
        refusals[case] = said.strip().splitlines()
        REFUSALS_FILE.write_text(json.dumps({c: refusals[c] for c in BAD if c in refusals}, indent=1, ensure_ascii=False) + "\n")
    assert said.strip().splitlines() == refusals[case]


def test_the_table_is_as_long_as_promised() -> None:
    assert len(GOOD) + len(BAD) >= 40


def test_null_is_stored_as_absent(crd: ClusterClient, namespace: str) -> None:
    spec = {**UNIFIED, "prefill": None, "engine": None}
    doc = {"apiVersion": f"{names.API_GROUP}/{names.API_VERSION}", "kind": names.KIND, "metadata": {"name": "nulls"}, "spec": spec}
    crd.kubectl("create", "-n", namespace, "-f", "-", stdin=json.dumps(doc))
    assert crd.get("infsvc", "nulls", "-n", namespace)["spec"] == UNIFIED


def test_kubectl_explain_tells_of_every_field(crd: ClusterClient) -> None:
    said = crd.kubectl("explain", "infsvc.spec", "--recursive").stdout
    for field in ("uri", "contextLength", "kvCache", "memory", "args", "replicas", "resources", "podTemplate", "timeoutSeconds"):
        assert field in said
    assert "default 4096" in crd.kubectl("explain", "infsvc.spec.engine.contextLength").stdout


def test_examples_are_accepted(crd: ClusterClient) -> None:
    for path in sorted((checkout() / "examples").glob("*.yaml")):
        crd.kubectl("apply", "--dry-run=server", "-f", str(path))
