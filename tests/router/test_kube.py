"""The kubernetes client behind `discovery.Source`, against scripted answers on 127.0.0.1: paths, selectors, frames, errors.

The real API server is the business of the end-to-end tests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from fleet_router.control.discovery import PODS, SERVICES, Gone, SourceError
from fleet_router.control.kube import KubernetesSource, kubernetes_source

Answer = tuple[int, list[bytes]]


class ScriptedApi:
    """Answers each GET by `answer(path, query)`: status and pieces of the body."""

    def __init__(self) -> None:
        self.answer: Callable[[str, dict[str, list[str]]], Answer] = lambda path, query: (404, [b"{}"])
        self.asked: list[tuple[str, dict[str, list[str]]]] = []
        self.server: asyncio.Server | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            url = urlsplit(head.split()[1].decode())
            query = parse_qs(url.query)
            self.asked.append((url.path, query))
            status, pieces = self.answer(url.path, query)
            writer.write(b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n" % status)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.001)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@pytest.fixture
async def api() -> AsyncIterator[ScriptedApi]:
    it = ScriptedApi()
    it.server = await asyncio.start_server(it.serve, "127.0.0.1", 0)
    yield it
    it.server.close()


@pytest.fixture
async def source(api: ScriptedApi, tmp_path: Path) -> AsyncIterator[KubernetesSource]:
    assert api.server is not None
    port = api.server.sockets[0].getsockname()[1]
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    content: dict[str, Any] = {"apiVersion": "v1", "kind": "Config", "current-context": "c", "users": [{"name": "u", "user": {}}]}
    content |= {"contexts": [context], "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}]}
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(content))
    it = await kubernetes_source(str(path))
    yield it
    await it.close()


def listing(*names: str) -> bytes:
    return json.dumps({"metadata": {"resourceVersion": "42"}, "items": [{"metadata": {"name": n}} for n in names]}).encode()


def event(kind: str, **o: Any) -> bytes:
    return json.dumps({"type": kind, "object": o}).encode() + b"\n"


async def test_services_and_worker_pods_of_all_namespaces_are_listed(api: ScriptedApi, source: KubernetesSource) -> None:
    api.answer = lambda path, query: (200, [listing("a", "b")])
    objects, version = await source.list(SERVICES)
    assert ([o["metadata"]["name"] for o in objects], version) == (["a", "b"], "42")
    await source.list(PODS)
    assert api.asked[0][0] == "/apis/radixfleet.io/v1alpha1/inferenceservices"
    assert api.asked[1] == ("/api/v1/pods", {"labelSelector": ["app.kubernetes.io/component in (worker,router)"]})


async def test_a_watch_gives_events_however_its_lines_are_cut_and_however_long_they_are(api: ScriptedApi, source: KubernetesSource) -> None:
    text = event("ADDED", metadata={"name": "a", "annotations": {"x": "y" * 300_000}}) + event("DELETED", metadata={"name": "a"})
    api.answer = lambda path, query: (200, [text[i : i + 70_001] for i in range(0, len(text), 70_001)])
    got = [(kind, o["metadata"]["name"]) async for kind, o in source.watch(PODS, "42")]
    assert got == [("ADDED", "a"), ("DELETED", "a")]
    query = api.asked[0][1]
    assert (query["resourceVersion"] == ["42"] and query["watch"] == ["True"]) or query["watch"] == ["true"]
    assert query["labelSelector"] == ["app.kubernetes.io/component in (worker,router)"]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((410, [b"{}"]), Gone),
        ((200, [event("ERROR", code=410, message="too old resource version")]), Gone),
        ((200, [event("ERROR", code=500, message="etcd is away")]), SourceError),
        ((403, [b'{"message": "forbidden"}']), SourceError),
        ((200, [b"{not json}\n"]), SourceError),
    ],
)
async def test_what_ends_a_watch_is_told_apart(answer: Answer, expected: type[Exception], api: ScriptedApi, source: KubernetesSource) -> None:
    api.answer = lambda path, query: answer
    with pytest.raises(expected):
        await anext(source.watch(PODS, "1"))


async def test_a_list_that_is_refused_says_why(api: ScriptedApi, source: KubernetesSource) -> None:
    api.answer = lambda path, query: (403, [b'{"message": "pods is forbidden"}'])
    with pytest.raises(SourceError, match="pods is forbidden"):
        await source.list(PODS)


async def test_no_way_to_an_api_server_is_said_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no way to the API server"):
        await kubernetes_source(str(tmp_path / "none"))
