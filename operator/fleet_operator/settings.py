"""Flags and environment of the operator, read once into one frozen object."""

from __future__ import annotations

import argparse
import os
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

from fleet_contract import names

PULL_POLICIES: Final = ("Always", "IfNotPresent", "Never")
LOG_LEVELS: Final = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a new revision gets when its spec does not say; pinned with it."""

    runtime_image: str
    image_pull_policy: str = "IfNotPresent"
    version: str = "0.0.0"


@dataclass(frozen=True, slots=True)
class Settings:
    """The whole configuration of one operator process."""

    defaults: Defaults
    identity: str  # holder of the Lease, unique per process
    system_namespace: str
    watch_namespaces: tuple[str, ...] = ()  # empty: the whole cluster
    health_port: int = names.OPERATOR_HEALTH_PORT
    health_host: str = "0.0.0.0"
    lease_seconds: int = 15
    resync_seconds: float = 180.0
    workers: int = 8
    log_level: str = "info"
    kubeconfig: str = ""  # empty: the pod's service account, else ~/.kube/config
    router_control_port: int = names.ROUTER_CONTROL_PORT
    router_tls: bool = False

    @property
    def url(self) -> str:
        """Base URL of the OpenAI API, inside the cluster."""
        return f"{'https' if self.router_tls else 'http'}://{names.ROUTER_SERVICE_NAME}.{self.system_namespace}/v1"


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from the command line and the pod's identity. A bad flag ends the process with a message and status 2."""
    env = os.environ if environ is None else environ
    parser = argparse.ArgumentParser(prog="radixfleet-operator", description="Turns InferenceServices into fleets of workers.")
    parser.add_argument("--runtime-image", required=True, help="image of workers whose podTemplate names none")
    parser.add_argument("--image-pull-policy", choices=PULL_POLICIES, default="IfNotPresent", help="of workers whose podTemplate names none")
    parser.add_argument("--watch-namespace", action="append", default=[], metavar="NS", help="serve this namespace only; repeat for more")
    parser.add_argument("--system-namespace", default=env.get(names.ENV_NAMESPACE) or names.SYSTEM_NAMESPACE, help="where router and Lease live")
    parser.add_argument("--router-tls", action="store_true", help="the routers' endpoint is https: what a service's status says of its URL")
    parser.add_argument("--health-host", default="0.0.0.0", help="address of /livez, /readyz and /metrics")
    parser.add_argument("--health-port", type=int, default=names.OPERATOR_HEALTH_PORT)
    parser.add_argument("--lease-seconds", type=_in_range(5, 300), default=15, help="how long a lost leader blocks the next one")
    parser.add_argument("--resync-seconds", type=_in_range(1, 3600), default=180, help="period of the full listing that repairs lost events")
    parser.add_argument("--workers", type=_in_range(1, 64), default=8, help="services that are worked on at the same time")
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="info")
    parser.add_argument("--kubeconfig", default="", help="file to use instead of the pod's service account")
    args = parser.parse_args(list(argv))
    pod = env.get(names.ENV_POD_NAME) or socket.gethostname()
    return Settings(
        defaults=Defaults(args.runtime_image, args.image_pull_policy, version("radixfleet")),
        identity=f"{pod}_{uuid.uuid4().hex[:8]}",
        system_namespace=args.system_namespace,
        watch_namespaces=tuple(args.watch_namespace),
        health_port=args.health_port,
        health_host=args.health_host,
        lease_seconds=args.lease_seconds,
        resync_seconds=float(args.resync_seconds),
        workers=args.workers,
        log_level=args.log_level,
        kubeconfig=args.kubeconfig,
        router_tls=args.router_tls,
    )


def _in_range(low: int, high: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is out of range; {low} to {high} is allowed")
        return value

    return integer
