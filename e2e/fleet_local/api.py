"""A few direct questions to an API server, faster than starting kubectl; and kubectl and helm themselves, for any cluster."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fleet_local import binaries
from fleet_local.errors import ClusterError


class AdminApi:
    """GET requests to a local cluster's API server with its admin certificate."""

    def __init__(self, pki: Path, port: int) -> None:
        self._port = port
        self._tls = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        self._tls.load_cert_chain(pki / "admin.crt", pki / "admin.key")

    def get(self, path: str, *, timeout_s: float = 5.0) -> tuple[int, bytes]:
        """Status and body; status 0 when nobody answers."""
        connection = http.client.HTTPSConnection("127.0.0.1", self._port, context=self._tls, timeout=timeout_s)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()

    def ready(self) -> bool:
        return self.get("/readyz")[0] == 200

    def object(self, path: str) -> dict[str, Any] | None:
        """An object or list of the API; None when it is not there."""
        status, body = self.get(path)
        if status != 200:
            return None
        found: dict[str, Any] = json.loads(body)
        return found


def is_true(resource: Mapping[str, Any], condition: str) -> bool:
    """Whether a resource's status has the condition with status True."""
    conditions = resource.get("status", {}).get("conditions") or []
    return any(c.get("type") == condition and c.get("status") == "True" for c in conditions)


class ClusterClient:
    """What tests and scripts do with a cluster, whoever runs it: everything goes through one kubeconfig."""

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig

    def environment(self) -> dict[str, str]:
        """For child processes that are to talk to this cluster."""
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig)}

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Runs kubectl. Raises ClusterError with what it said, unless `check` is false."""
        return self._run(binaries.CLUSTER, ["kubectl", *arguments], stdin, check=check, timeout_s=timeout_s)

    def helm(self, *arguments: str, check: bool = True, timeout_s: float = 600.0) -> subprocess.CompletedProcess[str]:
        """Runs helm (built on first use). Raises ClusterError with what it said, unless `check` is false."""
        return self._run("helm", list(arguments), None, check=check, timeout_s=timeout_s)

    def _run(self, program: str, arguments: list[str], stdin: str | None, *, check: bool, timeout_s: float) -> subprocess.CompletedProcess[str]:
        command = [str(binaries.ensure(program)), *arguments]
        quoted = " ".join(arguments)
        try:
            result = subprocess.run(
                command, input=stdin if stdin is not None else "", capture_output=True, text=True, env=self.environment(), timeout=timeout_s
            )
        except subprocess.TimeoutExpired as e:
            raise ClusterError(f"`{quoted}` did not end within {timeout_s:.0f} s") from e
        if check and result.returncode != 0:
            raise ClusterError(f"`{quoted}` failed with code {result.returncode}:\n{result.stderr.strip() or result.stdout.strip()}")
        return result

    def get(self, *arguments: str) -> dict[str, Any]:
        """`kubectl get … -o json`. Raises ClusterError, also when the object is not there."""
        found: dict[str, Any] = json.loads(self.kubectl("get", *arguments, "-o", "json").stdout)
        return found

    def apply(self, manifest: str | Mapping[str, Any], *, namespace: str | None = None) -> str:
        """Applies YAML text or one object, server-side, and returns what kubectl says."""
        text = manifest if isinstance(manifest, str) else json.dumps(manifest)
        where = ("-n", namespace) if namespace else ()
        return self.kubectl("apply", "--server-side", *where, "-f", "-", stdin=text).stdout

    def pod_get(self, namespace: str, pod: str, port: int, path: str) -> str:
        """GET of a pod's HTTP server, through the API server's proxy."""
        return self.kubectl("get", "--raw", f"/api/v1/namespaces/{namespace}/pods/{pod}:{port}/proxy/{quote(path.lstrip('/'), safe='/?&=:')}").stdout

    @contextmanager
    def published(self, namespace: str, target: str, port: int) -> Iterator[str]:
        """A URL on loopback for `svc/NAME` or `pod/NAME`, as long as the context lasts (kubectl port-forward: one pod of the service, for tests)."""
        command = [str(binaries.ensure(binaries.CLUSTER)), "kubectl", "-n", namespace, "port-forward", target, f":{port}", "--address", "127.0.0.1"]
        with subprocess.Popen(
            command, env=self.environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            try:
                line = process.stdout.readline()
                if not line.startswith("Forwarding from 127.0.0.1:"):
                    raise ClusterError(f"port-forward to {namespace} {target}:{port}: {line.strip() or 'ended'}")
                yield f"http://{line.split()[2]}"
            finally:
                process.terminate()


class ExistingCluster(ClusterClient):
    """A cluster that somebody else runs, by its kubeconfig."""

    def __init__(self, kubeconfig: Path) -> None:
        if not kubeconfig.is_file():
            raise ClusterError(f"--kubeconfig {kubeconfig}: there is no such file")
        super().__init__(kubeconfig.resolve())

    def exec_netns(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Not possible here. Raises ClusterError."""
        raise ClusterError("a command can be run in the network of a local cluster only; use a pod on this one")


def free_port() -> int:
    """A port of loopback that nobody holds now."""
    with socket.create_server(("127.0.0.1", 0)) as s:
        port: int = s.getsockname()[1]
        return port
