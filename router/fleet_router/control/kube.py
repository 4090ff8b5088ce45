"""The API server behind `discovery.Source`: the only module of the router that knows the kubernetes package. Control process only."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from typing import Any, Final

import aiohttp
import msgspec
from kubernetes.aio import client, config

from fleet_contract import names
from fleet_router.control.discovery import PODS, WATCH_S, Gone, Json, SourceError
from fleet_router.errors import UNDECODABLE

LIST_TIMEOUT_S: Final = 30.0
SELECTOR: Final = f"{names.LABEL_COMPONENT} in ({names.COMPONENT_WORKER},{names.COMPONENT_ROUTER})"


class KubernetesSource:
    """Lists and watches over one client."""

    def __init__(self, api: Any) -> None:
        self._api = api
        self._core = client.CoreV1Api(api)
        self._custom = client.CustomObjectsApi(api)

    async def list(self, kind: str) -> tuple[list[Json], str]:
        response = await self._call(kind, LIST_TIMEOUT_S)
        try:
            async with asyncio.timeout(LIST_TIMEOUT_S):
                answer = msgspec.json.decode(await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError, *UNDECODABLE) as e:
            raise SourceError(f"list of {kind}: {e or type(e).__name__}") from e
        return list(answer.get("items") or []), str(answer["metadata"]["resourceVersion"])

    async def watch(self, kind: str, resource_version: str) -> AsyncIterator[tuple[str, Json]]:
        response = await self._call(
            kind, WATCH_S + 30, watch=True, resource_version=resource_version, timeout_seconds=WATCH_S, allow_watch_bookmarks=True
        )
        held = b""
        try:
            async for data in response.content.iter_any():
                *lines, held = (held + data).split(b"\n")
                for line in lines:
                    if line:
                        yield self._event(msgspec.json.decode(line))
        except (aiohttp.ClientError, TimeoutError, OSError, *UNDECODABLE) as e:
            raise SourceError(f"watch of {kind}: {e or type(e).__name__}") from e
        finally:
            response.close()

    async def close(self) -> None:
        await self._api.close()

    @staticmethod
    def _event(event: Any) -> tuple[str, Json]:
        if event["type"] == "ERROR":
            status = event["object"]
            if status.get("code") == 410:
                raise Gone(status.get("message", ""))
            raise SourceError(f"watch: {status.get('code')} {status.get('message')}")
        return event["type"], event["object"]

    async def _call(self, kind: str, timeout_s: float, **options: Any) -> Any:
        """A raw answer with status 200; its body is not read yet."""
        options["_request_timeout"] = timeout_s
        try:
            if kind == PODS:
                response = await self._core.list_pod_for_all_namespaces_without_preload_content(label_selector=SELECTOR, **options)
            else:
                response = await self._custom.list_cluster_custom_object_without_preload_content(
                    names.API_GROUP, names.API_VERSION, names.PLURAL, **options
                )
        except (aiohttp.ClientError, TimeoutError, OSError, ssl.SSLError, client.ApiException) as e:
            raise SourceError(f"{kind}: {e or type(e).__name__}") from e
        status = response.status
        if status != 200:
            text = (await response.read())[:300].decode("utf-8", "replace")
            response.close()
            if status == 410:
                raise Gone(text)
            raise SourceError(f"{kind}: the API server answers {status}: {text}")
        return response


async def kubernetes_source(kubeconfig: str) -> KubernetesSource:
    """Connects by a kubeconfig file, or by the pod's service account. Raises SourceError."""
    settings = client.Configuration()
    try:
        if kubeconfig:
            await config.load_kube_config(config_file=kubeconfig, client_configuration=settings)  # type: ignore[no-untyped-call]
        else:
            config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
    except (config.ConfigException, OSError) as e:
        raise SourceError(f"no way to the API server: {e}") from e
    return KubernetesSource(client.ApiClient(settings))
