"""The API server: a Protocol for the rest of the operator, and its implementation. The only module that knows the `kubernetes` package.

Every write first passes `guard`, which ends the process when its Lease may have passed to another.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio import client, config

from fleet_contract import names
from fleet_operator.errors import ClusterError
from fleet_operator.facts import Obj

REQUEST_TIMEOUT_S: Final = 30
PAGE: Final = 200  # objects per LIST page


@dataclass(frozen=True, slots=True)
class Kind:
    """One resource of the API server."""

    api_version: str
    kind: str
    plural: str

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """URL path; without a namespace: of the whole cluster."""
        root = f"/api/{self.api_version}" if "/" not in self.api_version else f"/apis/{self.api_version}"
        parts = [root, *(("namespaces", namespace) if namespace else ()), self.plural, *((name,) if name else ())]
        return "/".join((*parts, subresource) if subresource else parts)


INFERENCE_SERVICE: Final = Kind(f"{names.API_GROUP}/{names.API_VERSION}", names.KIND, names.PLURAL)
STATEFUL_SET: Final = Kind("apps/v1", "StatefulSet", "statefulsets")
CONTROLLER_REVISION: Final = Kind("apps/v1", "ControllerRevision", "controllerrevisions")
SERVICE: Final = Kind("v1", "Service", "services")
CONFIG_MAP: Final = Kind("v1", "ConfigMap", "configmaps")
POD: Final = Kind("v1", "Pod", "pods")
EVENT: Final = Kind("v1", "Event", "events")
LEASE: Final = Kind("coordination.k8s.io/v1", "Lease", "leases")
CHILD_KINDS: Final = (STATEFUL_SET, CONTROLLER_REVISION, SERVICE, CONFIG_MAP)
BY_KIND: Final = {kind.kind: kind for kind in (*CHILD_KINDS, POD, INFERENCE_SERVICE)}


class Cluster(Protocol):
    """What the operator asks of an API server. All raise ClusterError."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Obj | None:
        """The object, or None when there is none."""

    async def list(self, kind: Kind, namespace: str | None, *, labels: str = "", fields: str = "") -> list[Obj]:
        """All that match, in pages."""

    async def apply(self, kind: Kind, obj: Obj, *, subresource: str = "") -> Obj:
        """Server-side apply by our field manager. With metadata.uid: only to that very object (409 otherwise)."""

    async def annotate(self, kind: Kind, namespace: str, name: str, uid: str, annotations: Mapping[str, str | None]) -> None:
        """Sets or (None) removes annotations of that very object."""

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """Deletes that very object in the background; one that is gone is no error."""

    async def record(self, event: Obj) -> None:
        """Creates an Event."""

    async def create(self, kind: Kind, obj: Obj) -> Obj:
        """Plain create, without the guard: for the Lease. 409 when the name is taken."""

    async def replace(self, kind: Kind, obj: Obj) -> Obj:
        """Plain update with obj's resourceVersion as precondition, without the guard: for the Lease."""


class TokenBucket:
    """Bounds the calls of this process: `rate` a second on average, `burst` at once."""

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._tokens, self._at = float(burst), clock()

    def reserve(self) -> float:
        """Takes a token and returns the seconds to wait before using it."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate) - 1
        self._at = now
        return max(0.0, -self._tokens / self._rate)


class KubernetesCluster:
    """The real one. `calls` counts requests by verb, for metrics."""

    def __init__(self, api: client.ApiClient, *, guard: Callable[[], None] = lambda: None) -> None:
        self._api = api
        self._bucket = TokenBucket(rate=50, burst=100)
        self.guard = guard
        self.calls: Counter[tuple[str, int]] = Counter()

    @classmethod
    async def connect(cls, kubeconfig: str = "") -> KubernetesCluster:
        """By kubeconfig file, else the pod's service account, else the user's default kubeconfig."""
        configuration = client.Configuration()
        if kubeconfig:
            await config.load_kube_config(config_file=kubeconfig, client_configuration=configuration)  # type: ignore[no-untyped-call]
        else:
            try:
                config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
            except config.ConfigException:
                await config.load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        return cls(client.ApiClient(configuration))

    async def close(self) -> None:
        """Closes the connections."""
        await self._api.close()  # type: ignore[no-untyped-call]

    async def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "",
        is_guarded: bool = True,
    ) -> Obj:
        """One request, past the generated methods: those have no way to choose the content type of an apply."""
        await asyncio.sleep(self._bucket.reserve())
        if method != "GET" and is_guarded:
            self.guard()
        headers = {"Accept": "application/json", "Content-Type": content_type or "application/json"}
        serialized = await self._api.param_serialize(method, path, header_params=headers, auth_settings=["BearerToken"])
        url = serialized[1] + (f"?{urlencode(query)}" if query else "")
        try:
            answer = await self._api.rest_client.request(  # type: ignore[no-untyped-call]
                method, url, headers=serialized[2], body=body, _request_timeout=REQUEST_TIMEOUT_S
            )
            data = await answer.read()
        except (TimeoutError, OSError, aiohttp.ClientError) as e:
            self.calls[method, 0] += 1
            raise ClusterError(0, "Unreachable", f"the API server does not answer: {e or type(e).__name__}") from e
        self.calls[method, answer.status] += 1
        try:
            result = json.loads(data or b"{}")
        except ValueError:
            result = {"message": data[:300].decode("utf-8", "replace")}
        if not 200 <= answer.status < 300:
            raise ClusterError(answer.status, result.get("reason") or "Unknown", result.get("message") or f"the API server answered {answer.status}")
        return dict(result)

    async def get(self, kind: Kind, namespace: str, name: str) -> Obj | None:
        """See Cluster."""
        try:
            return await self._call("GET", kind.path(namespace, name))
        except ClusterError as e:
            if e.status == 404:
                return None
            raise

    async def list(self, kind: Kind, namespace: str | None, *, labels: str = "", fields: str = "") -> list[Obj]:
        """See Cluster."""
        query = {"limit": str(PAGE)} | ({"labelSelector": labels} if labels else {}) | ({"fieldSelector": fields} if fields else {})
        found: list[Obj] = []
        while True:
            page = await self._call("GET", kind.path(namespace), query=query)
            # The items of a list come without these two.
            found += [{"apiVersion": kind.api_version, "kind": kind.kind, **item} for item in page.get("items") or ()]
            if not (more := (page.get("metadata") or {}).get("continue")):
                return found
            query["continue"] = more

    async def apply(self, kind: Kind, obj: Obj, *, subresource: str = "") -> Obj:
        """See Cluster."""
        meta = obj["metadata"]
        return await self._call(
            "PATCH",
            kind.path(meta["namespace"], meta["name"], subresource),
            query={"fieldManager": names.FIELD_MANAGER, "force": "true", "fieldValidation": "Strict"},
            body=obj,
            content_type="application/apply-patch+yaml",
        )

    async def annotate(self, kind: Kind, namespace: str, name: str, uid: str, annotations: Mapping[str, str | None]) -> None:
        """See Cluster."""
        body = {"metadata": {"uid": uid, "annotations": dict(annotations)}}
        query = {"fieldManager": names.FIELD_MANAGER}
        await self._call("PATCH", kind.path(namespace, name), query=query, body=body, content_type="application/merge-patch+json")

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """See Cluster."""
        try:
            body = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background", "preconditions": {"uid": uid}}
            await self._call("DELETE", kind.path(namespace, name), body=body)
        except ClusterError as e:
            if e.status != 404:
                raise

    async def record(self, event: Obj) -> None:
        """See Cluster."""
        await self._call("POST", EVENT.path(event["metadata"]["namespace"]), query={"fieldManager": names.FIELD_MANAGER}, body=event)

    async def create(self, kind: Kind, obj: Obj) -> Obj:
        """See Cluster."""
        path = kind.path(obj["metadata"]["namespace"])
        return await self._call("POST", path, query={"fieldManager": names.FIELD_MANAGER}, body=obj, is_guarded=False)

    async def replace(self, kind: Kind, obj: Obj) -> Obj:
        """See Cluster."""
        meta = obj["metadata"]
        path = kind.path(meta["namespace"], meta["name"])
        return await self._call("PUT", path, query={"fieldManager": names.FIELD_MANAGER}, body=obj, is_guarded=False)
