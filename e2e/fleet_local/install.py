"""Installs the chart of a checkout on a cluster; nothing happens when that very chart with those values is there already."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fleet_contract.names import SYSTEM_NAMESPACE
from fleet_local import binaries
from fleet_local.api import ClusterClient
from fleet_local.errors import ClusterError
from fleet_local.hostview import IMAGE
from fleet_local.steps import wait_until

RELEASE: Final = "radixfleet"
IMAGES: Final = ("operator", "router", "runtime")
_HELM_LIMIT_S: Final = 200.0  # a bit more than the --timeout that helm gets


def checkout() -> Path:
    """The root of the checkout that we are part of. Raises ClusterError when we were installed from a wheel."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "charts" / "radixfleet" / "Chart.yaml").is_file():
        raise ClusterError(f"there is no charts/radixfleet below {root}; run this from a checkout of the repository")
    return root


def local_values() -> dict[str, str]:
    """Chart values for the local cluster: every image is the view of the host, one replica of each."""
    return {**{f"images.{name}": IMAGE for name in IMAGES}, "operator.replicas": "1", "router.replicas": "1"}


def registry_values(registry: str, tag: str) -> dict[str, str]:
    """Chart values for images that were built from docker/ and pushed to a registry."""
    return {f"images.{name}": f"{registry.rstrip('/')}/radixfleet-{name}:{tag}" for name in IMAGES}


def chart_hash(chart: Path, values: Mapping[str, str]) -> str:
    """What a release is made of: every file of the chart by name and content, and the values."""
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
    for path in sorted(p for p in chart.rglob("*") if p.is_file()):
        data = path.read_bytes()
        digest.update(f"\n{path.relative_to(chart)} {len(data)}\n".encode() + data)
    return digest.hexdigest()[:16]


def install_chart(cluster: ClusterClient, root: Path, values: Mapping[str, str]) -> bool:
    """Installs or upgrades the release and waits for its Deployments. False when there was nothing to do. Raises ClusterError.

    Helm never touches the files of a chart's crds/ after the first install, so those are applied here.
    """
    chart = root / "charts" / "radixfleet"
    wanted = f"chart {chart_hash(chart, values)}"
    release = _release(cluster)
    if _is_pending(release):
        wait_until("the helm of an earlier run", lambda: not _helm_runs(cluster), limit_s=_HELM_LIMIT_S)
        release = _release(cluster)
    if _is_deployed(release, wanted):
        return False
    if _is_pending(release):
        _forget_attempt(cluster, release)
    if (chart / "crds").is_dir():
        cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(chart / "crds"))
    settings = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    where = ("-n", SYSTEM_NAMESPACE, "--create-namespace")
    try:
        cluster.helm("upgrade", "--install", RELEASE, str(chart), *where, "--wait", "--timeout", "3m", "--description", wanted, *settings)
    except ClusterError as e:
        raise ClusterError(f"{e}\n{explain_pods(cluster, SYSTEM_NAMESPACE)}") from e
    return True


def _release(cluster: ClusterClient) -> dict[str, Any]:
    """What helm knows of our release; empty when it knows none."""
    status = cluster.helm("status", RELEASE, "-n", SYSTEM_NAMESPACE, "-o", "json", check=False)
    found: dict[str, Any] = json.loads(status.stdout) if status.returncode == 0 else {}
    return found


def _is_pending(status: Mapping[str, Any]) -> bool:
    return str(status.get("info", {}).get("status", "")).startswith("pending-")


def _helm_runs(cluster: ClusterClient) -> bool:
    """True while a helm for this cluster runs on this machine: when `up` is killed, its helm goes on."""
    program, setting = str(binaries.ensure("helm")).encode(), f"KUBECONFIG={cluster.kubeconfig}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cmdline").read_bytes().startswith(program + b"\0") and setting in (process / "environ").read_bytes().split(b"\0"):
                return True
        except OSError:
            continue  # it ended meanwhile
    return False


def _forget_attempt(cluster: ClusterClient, status: Mapping[str, Any]) -> None:
    """Removes the record of an attempt whose helm was killed: while it stands, helm refuses all others. The objects stay, the next helm has them."""
    cluster.kubectl("delete", "secret", f"sh.helm.release.v1.{RELEASE}.v{status['version']}", "-n", SYSTEM_NAMESPACE, "--ignore-not-found")


def _is_deployed(status: Mapping[str, Any], wanted: str) -> bool:
    info = status.get("info", {})
    return bool(info.get("status") == "deployed" and info.get("description") == wanted)


def explain_pods(cluster: ClusterClient, namespace: str, selector: str = "") -> str:
    """What pods of a namespace say of themselves, a few lines each: for error messages."""
    result = cluster.kubectl("get", "pods", "-n", namespace, "-o", "json", *(("-l", selector) if selector else ()), check=False)
    if result.returncode != 0:
        return f"  (no pods to look at: {result.stderr.strip()})"
    return "\n".join(line for pod in json.loads(result.stdout)["items"] for line in pod_lines(pod)) or f"  there are no pods in {namespace}"


def pod_lines(pod: Mapping[str, Any]) -> list[str]:
    """One pod in words: phase, what its containers wait for or why they ended, why it is not scheduled. Pure."""
    status = pod.get("status", {})
    lines = [f"  pod {pod['metadata']['name']}: {status.get('phase', 'unknown')}"]
    for c in status.get("conditions") or []:
        if c.get("type") == "PodScheduled" and c.get("status") == "False":
            lines.append(f"    not scheduled: {c.get('message', c.get('reason', ''))}")
    for c in status.get("containerStatuses") or []:
        state = c.get("state", {})
        if waiting := state.get("waiting"):
            lines.append(f"    {c['name']} waits: {waiting.get('reason', '')} {waiting.get('message', '')}".rstrip())
        ended = state.get("terminated") or c.get("lastState", {}).get("terminated")
        if ended:
            message = ended.get("message", "").strip()
            lines.append(f"    {c['name']} ended with code {ended.get('exitCode')} ({ended.get('reason', '')}): {message}".rstrip(": "))
        if not c.get("ready") and "running" in state:
            lines.append(f"    {c['name']} runs but is not ready; restarts: {c.get('restartCount', 0)}")
    return lines
