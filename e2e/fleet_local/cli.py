"""`radixfleet local up|down|status|logs|kubectl|helm`: a real one-node Kubernetes on this machine."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fleet_local import binaries
from fleet_local.cluster import LocalCluster
from fleet_local.components import COMPONENTS
from fleet_local.errors import ClusterError
from fleet_local.layout import DEFAULT_API_PORT, DEFAULT_ROUTER_PORT, default_state


def main(argv: Sequence[str]) -> int:
    """Runs one command; exit codes: 0 fine, 1 failed or not running, 2 wrong usage. kubectl and helm replace this process."""
    words = list(argv)
    options = _parser().parse_args(words[: _passed_on(words)])
    try:
        return _run(options, words[_passed_on(words) :])
    except ClusterError as e:
        print(f"radixfleet local {options.command}: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"radixfleet local {options.command}: interrupted; run it again and it goes on", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="radixfleet local", description="A real one-node Kubernetes on this machine (Linux, root).")
    parser.add_argument("--state", type=Path, default=None, metavar="DIR", help=f"the cluster's folder; default {default_state()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.add_argument("--state", type=Path, default=argparse.SUPPRESS, metavar="DIR", help="the cluster's folder")
        return sub

    up = command("up", "start what is missing; changes nothing on a running cluster")
    up.add_argument("--api-port", type=int, metavar="PORT", help=f"the API server's port on 127.0.0.1; default {DEFAULT_API_PORT} or a free one")
    up.add_argument("--router-port", type=int, metavar="PORT", help=f"the router's port on 127.0.0.1; default {DEFAULT_ROUTER_PORT} or a free one")
    command("down", "end and remove everything but the cache")
    command("status", "what runs; exit code 1 when something does not")
    logs = command("logs", "a component's log; without a name the list of them")
    logs.add_argument("component", nargs="?", choices=COMPONENTS)
    logs.add_argument("-n", "--lines", type=int, default=100, help="how many lines of the end; default 100")
    logs.add_argument("-f", "--follow", action="store_true", help="go on as it grows")
    command("kubectl", "kubectl of this cluster; all arguments are passed on")
    command("helm", "helm for this cluster; all arguments are passed on")
    return parser


def _passed_on(words: Sequence[str]) -> int:
    """Where the arguments of kubectl or helm begin: they may look like our own options, so argparse must not see them. Pure."""
    i = 0
    while i < len(words):
        if words[i] == "--state":
            i += 2
        elif words[i] in ("kubectl", "helm"):
            return i + 1
        elif words[i].startswith("--state="):
            i += 1
        else:
            break
    return len(words)


def _run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    cluster = LocalCluster(options.state or default_state())
    match options.command:
        case "up":
            started = time.monotonic()
            cluster.up(api_port=options.api_port, router_port=options.router_port)
            print(
                f"cluster ready in {time.monotonic() - started:.1f} s; router endpoint {cluster.router_url}; export KUBECONFIG={cluster.kubeconfig}"
            )
        case "down":
            was_there = cluster.down()
            print("cluster removed" if was_there else f"there is no cluster at {cluster.layout.state}; nothing to remove")
        case "status":
            return _status(cluster)
        case "logs":
            return _logs(cluster, options)
        case "kubectl" | "helm":
            _become(cluster, options.command, rest)
    return 0


def _status(cluster: LocalCluster) -> int:
    memory, parts = cluster.memory, cluster.status()
    if memory is None:
        print(f"there is no cluster at {cluster.layout.state}; start it with `radixfleet local up`")
        return 1
    for part in parts:
        what = f"pid {part.pid:<8} {part.rss_bytes / 2**20:6.0f} MiB  {part.running_s:8.0f} s" if part.pid else "not running"
        print(f"  {part.name:<20} {what}")
    dead = [p.name for p in parts if p.pid is None]
    ready = cluster.node_ready()
    print(f"  node                 {'Ready' if ready else 'not Ready'}")
    print(f"state {cluster.layout.state}; router endpoint {cluster.router_url}; export KUBECONFIG={cluster.kubeconfig}")
    if dead or not ready:
        what = f"not running: {', '.join(dead)}" if dead else "the node is not Ready"
        print(f"{what}; `radixfleet local up` starts what is missing, `radixfleet local down` removes it")
        return 1
    return 0


def _logs(cluster: LocalCluster, options: argparse.Namespace) -> int:
    if options.component is None:
        for name in COMPONENTS:
            print(cluster.layout.log / f"{name}.log")
        return 0
    path = cluster.layout.log / f"{options.component}.log"
    if not path.exists():
        raise ClusterError(f"there is no log of {options.component} at {path}; was the cluster started?")
    sys.stdout.flush()
    os.execvp("tail", ["tail", "-n", str(options.lines), *(["-F"] if options.follow else []), str(path)])


def _become(cluster: LocalCluster, program: str, rest: Sequence[str]) -> None:
    if not cluster.kubeconfig.exists():
        raise ClusterError(f"there is no cluster at {cluster.layout.state}; start it with `radixfleet local up`")
    name = binaries.CLUSTER if program == "kubectl" else program
    path = str(binaries.ensure(name, lambda text: print(text, file=sys.stderr)))
    arguments = [path, "kubectl", *rest] if program == "kubectl" else [path, *rest]
    os.execve(path, arguments, cluster.environment())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
