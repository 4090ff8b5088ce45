"""A real one-node Kubernetes on this machine, as an object: `LocalCluster(state).up()`, `.down()`.

Level-based: `up` looks at what is there (files, namespaces, processes by pid and start time) and adds what is missing, so it goes on after it was
killed anywhere and changes nothing on a running cluster. `down` ends what is in the cluster's cgroup and removes its folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from fleet_contract.names import ROUTER_SERVICE_NAME, ROUTER_SERVICE_PORT, SYSTEM_NAMESPACE
from fleet_local import binaries, cgroups, components, facts, hostview, processes
from fleet_local.api import AdminApi, ClusterClient, free_port, is_true
from fleet_local.cgroups import CgroupPlan
from fleet_local.components import COMPONENTS, CONTAINERD_SOCKET, Settings
from fleet_local.errors import ClusterError
from fleet_local.layout import DEFAULT_API_PORT, DEFAULT_ROUTER_PORT, Layout, Memory, write_atomically
from fleet_local.namespaces import COVERED, NODE_IP
from fleet_local.pki import NODE_NAME, USERS, kubeconfig, make_certificates
from fleet_local.processes import Action, ProcessRecord
from fleet_local.steps import Progress, Step, run_steps, wait_until

_FORWARDER: Final = Path(__file__).with_name("forwarder.py")
_READY_LIMIT_S: Final = 120.0
_STOP_GRACE_S: Final = 5.0


def _print(text: str) -> None:
    print(text, flush=True)


@dataclass(frozen=True, slots=True)
class ComponentStatus:
    """One component: `pid` is None when it does not run."""

    name: str
    pid: int | None
    rss_bytes: int
    running_s: float


class LocalCluster(ClusterClient):
    """One cluster, named by its state folder.

    Attributes:
        memory: the ports it is published on; None before the first `up`.
    """

    def __init__(self, state: Path, *, say: Callable[[str], None] = _print, quiet: bool = False) -> None:
        self.layout = Layout.of(state)
        super().__init__(self.layout.kubeconfig)
        self._progress = Progress(say, quiet=quiet)
        self._cgroups: CgroupPlan | None = None
        self._settings: Settings | None = None

    # ---- what it is like ----

    def environment(self) -> dict[str, str]:
        """As for any cluster; and kubectl keeps its notes in our state folder, not in the user's home, so that `down` takes them along."""
        return {**super().environment(), "KUBECACHEDIR": str(self.layout.state / "kubectl-cache")}

    @property
    def memory(self) -> Memory | None:
        return self.layout.recall()

    @property
    def router_url(self) -> str:
        """The OpenAI endpoint on loopback. Raises ClusterError when the cluster was never started."""
        memory = self.memory
        if memory is None:
            raise ClusterError(f"there is no cluster at {self.layout.state}; start it with `radixfleet local up`")
        return f"http://127.0.0.1:{memory.router_port}/v1"

    def status(self) -> list[ComponentStatus]:
        """All components, running or not; empty when there is no cluster."""
        if self.memory is None:
            return []
        boot, found = processes.boot_id(), list[ComponentStatus]()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        for name in COMPONENTS:
            record = processes.read_record(self._record(name))
            if record is None or not processes.is_alive(record, this_boot=boot):
                found.append(ComponentStatus(name, None, 0, 0.0))
                continue
            running_s = uptime - record.started_ticks / os.sysconf("SC_CLK_TCK")
            try:
                rss = int(Path(f"/proc/{record.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            except OSError:
                rss = 0
            found.append(ComponentStatus(name, record.pid, rss, running_s))
        return found

    def node_ready(self) -> bool:
        """Whether the node says Ready now."""
        memory = self.memory
        if memory is None or not self.layout.pki.is_dir():
            return False
        node = AdminApi(self.layout.pki, memory.api_port).object(f"/api/v1/nodes/{NODE_NAME}")
        return node is not None and is_true(node, "Ready")

    def exec_netns(self, *command: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Runs a command of the host inside the cluster's network (it reaches pods and services). Raises ClusterError when it fails."""
        inside = ["nsenter", f"--net={self.layout.namespaces.net}", "--", *command]
        result = subprocess.run(inside, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=timeout_s)
        if result.returncode != 0:
            raise ClusterError(f"`{' '.join(command)}` failed with code {result.returncode}: {result.stderr.strip()}")
        return result

    def connect(self, host: str, port: int, *, timeout_s: float = 5.0) -> socket.socket:
        """A TCP connection of this process to a pod, service or node address of the cluster. Raises OSError."""
        return self.layout.namespaces.connect(host, port, timeout_s=timeout_s)

    # ---- up ----

    def up(self, *, api_port: int | None = None, router_port: int | None = None) -> None:
        """Starts what is missing; returns when the node is Ready and answers DNS. Raises ClusterError."""
        self.layout.recall()  # a stranger's folder is refused before anything is written into it
        if found := facts.problems(facts.gather(self.layout.state)):
            raise ClusterError("\n".join(found))
        if closed := hostview.closed_to_others(hostview.this_host()):
            raise ClusterError(f"pods run as nobody and cannot read {closed[0]}; open it with `chmod -R o+rX {' '.join(closed)}`")
        os.environ["PATH"] = facts.search_path()
        with self.layout.locked():
            self._remember_ports(api_port, router_port)
            run_steps(self._steps(), self._progress.step)

    def _remember_ports(self, api_port: int | None, router_port: int | None) -> None:
        known = self.layout.recall()
        wanted = (
            ("forward-api", api_port, known.api_port if known else None, DEFAULT_API_PORT),
            ("forward-router", router_port, known.router_port if known else None, DEFAULT_ROUTER_PORT),
        )
        chosen: list[int] = []
        for component, asked, remembered, default in wanted:
            record = processes.read_record(self._record(component))
            ours = record is not None and processes.is_alive(record)
            free = [p for p in (asked, remembered, default) if p is not None and p not in chosen and facts.port_is_free(p)]
            port = facts.choose_port(asked=asked, remembered=remembered, default=default, ours=ours, free=free, spare=free_port())
            if isinstance(port, str):
                raise ClusterError(port)
            if remembered is None and asked is None and port != default:
                what = "API server" if component == "forward-api" else "router"
                self._progress.say(f"  port {default} of 127.0.0.1 is taken; the {what} will be at port {port}")
            chosen.append(port)
        self.layout.remember(Memory(api_port=chosen[0], router_port=chosen[1]))

    def _steps(self) -> list[Step]:
        def component(name: str, *needs: str, then: Callable[[], None] | None = None) -> Step:
            return Step(name, ("binaries", "configuration", *needs), lambda: self._component(name, then))

        return [
            Step("binaries", (), self._binaries),
            Step("certificates", (), self._certificates),
            Step("cgroups", (), self._make_cgroups),
            Step("namespaces", (), self._make_namespaces),
            Step("configuration", ("binaries", "certificates", "cgroups", "namespaces"), self._configuration),
            component("forward-api"),
            component("forward-router"),
            component("etcd", then=lambda: self._await("etcd", lambda: self._http_ok("127.0.0.1", 2379, "/health"))),
            component("containerd", then=lambda: self._await("containerd", self._containerd_answers)),
            component("apiserver", "etcd", "forward-api", then=lambda: self._await("apiserver", self._api().ready)),
            component("controller-manager", "apiserver"),
            component("scheduler", "apiserver"),
            component("proxy", "apiserver"),
            component("coredns", "apiserver"),
            Step("images", ("containerd",), self._images),
            component("kubelet", "apiserver", "images"),
            Step("node", COMPONENTS, self._node),
        ]

    def _binaries(self) -> str | None:
        binary = binaries.ensure(binaries.CLUSTER, lambda t: self._progress.say(f"  {t}"))
        binaries.ensure(binaries.PAUSE, lambda t: self._progress.say(f"  {t}"))
        mountinfo = Path("/proc/self/mountinfo").read_text()
        self._settings = Settings(binary, f"/{self.layout.cgroup}", facts.snapshotter(mountinfo, self.layout.state))
        return None

    def _certificates(self) -> str | None:
        if self.layout.pki.is_dir():
            return None
        make_certificates(self.layout.pki)
        return "made"

    def _make_cgroups(self) -> str | None:
        plan = cgroups.choose_cgroups(cgroups.gather_cgroups(), self.layout.cgroup)
        if isinstance(plan, str):
            raise ClusterError(plan)
        self._cgroups = plan
        if cgroups.have_cgroups(plan, COMPONENTS):
            return None
        cgroups.make_cgroups(plan, COMPONENTS)
        return f"version {plan.version}, {plan.root}"

    def _make_namespaces(self) -> str | None:
        namespaces = self.layout.namespaces
        if namespaces.exist():
            return None
        # What still runs belongs to namespaces that cannot be entered any more.
        cgroups_now = cgroups.cluster_folders(cgroups.gather_cgroups().mounts, self.layout.cgroup)
        processes.kill_all(cgroups_now, limit_s=20.0)
        binds = self.layout.binds()
        sources = {*(Path(b.source) for b in hostview.this_host()), *(Path(b.target) for b in hostview.this_host() if Path(b.target).exists())}
        keep = {p for p in (self.layout.state, binaries.MODULE.parent, *sources) if any(p.is_relative_to(c) for c in COVERED)}
        namespaces.make(binds=binds, keep=keep)
        return "network and mounts"

    def _configuration(self) -> str | None:
        layout, settings = self.layout, self._need_settings()
        spec = json.loads(subprocess.check_output(["ctr", "oci", "spec"], text=True))
        files = {
            layout.config / "base-spec.json": json.dumps(hostview.base_spec(spec, hostview.this_host())),
            layout.config / "containerd.toml": components.containerd_config(layout, settings),
            layout.config / "cni" / "10-pods.conflist": components.cni_config(),
            layout.config / "kubelet.json": components.kubelet_config(layout, settings),
            layout.config / "proxy.json": components.proxy_config(layout),
            layout.config / "Corefile": components.corefile(layout),
            **{layout.inner_kubeconfig(u): kubeconfig(layout.pki, u, f"https://{NODE_IP}:{components.API_PORT}") for u in USERS},
            layout.kubeconfig: kubeconfig(layout.pki, "admin", f"https://127.0.0.1:{self._need_memory().api_port}"),
        }
        spec_file = layout.config / "base-spec.json"
        if spec_file.exists() and spec_file.read_text() != files[spec_file]:
            self._progress.say(
                "  this cluster showed another checkout or interpreter to its pods; new pods see this one, running pods keep the old one"
            )
        written = [path.name for path, text in files.items() if write_atomically(path, text)]
        for folder in (layout.log, layout.run):
            folder.mkdir(exist_ok=True)
        return f"{len(written)} files" if written else None

    def _component(self, name: str, then: Callable[[], None] | None) -> str | None:
        forward = {
            "forward-api": f"{NODE_IP}:{components.API_PORT}",
            "forward-router": f"{ROUTER_SERVICE_NAME}.{SYSTEM_NAMESPACE}.svc.cluster.local:{ROUTER_SERVICE_PORT}",
        }
        command = ["python", str(_FORWARDER), forward[name]] if name in forward else components.command(name, self.layout, self._need_settings())
        fingerprint = self._fingerprint(name, command)
        record = processes.read_record(self._record(name))
        action = processes.decide(record, alive=record is not None and processes.is_alive(record), fingerprint=fingerprint)
        if action is Action.REPLACE:
            assert record is not None
            processes.stop(record, grace_s=_STOP_GRACE_S)
        if action is not Action.KEEP:
            if name in forward:
                self._start_forwarder(name, forward[name], fingerprint)
            else:
                self._start(name, self.layout.namespaces.enter(*command), fingerprint)
        if then is not None:
            then()
        return {Action.KEEP: None, Action.START: "started", Action.REPLACE: "started anew, for what it depends on has changed"}[action]

    def _fingerprint(self, name: str, command: Sequence[str]) -> str:
        """A hash over all that a process was started with; another one means that it must be replaced."""
        digest = hashlib.sha256("\0".join([*command, self.layout.namespaces.identity()]).encode())
        read = {
            "containerd": ["containerd.toml", "base-spec.json"],
            "kubelet": ["kubelet.json", "kubelet.kubeconfig"],
            "proxy": ["proxy.json", "proxy.kubeconfig"],
            "coredns": ["Corefile", "coredns.kubeconfig"],
        }
        for file in read.get(name, []):
            digest.update((self.layout.config / file).read_bytes())
        if name in components.API_CLIENTS:
            digest.update(repr(processes.read_record(self._record("apiserver"))).encode())
        if name.startswith("forward"):
            digest.update(_FORWARDER.read_bytes())
            digest.update(str(self._forward_port(name)).encode())
        return digest.hexdigest()[:16]

    def _start(self, name: str, command: Sequence[str], fingerprint: str, pass_fds: Sequence[int] = ()) -> ProcessRecord:
        assert self._cgroups is not None
        procs = cgroups.component_folder(self._cgroups, name) / "cgroup.procs"
        log = self.layout.log / f"{name}.log"
        return processes.start(command, record=self._record(name), fingerprint=fingerprint, log=log, cgroup_procs=procs, pass_fds=pass_fds)

    def _start_forwarder(self, name: str, target: str, fingerprint: str) -> None:
        """The child is born with a listening socket of the host, then enters the cluster's network."""
        port = self._forward_port(name)
        try:
            listener = socket.create_server(("127.0.0.1", port), backlog=1024)
        except OSError as e:
            raise ClusterError(f"port {port} of 127.0.0.1 is taken ({e.strerror}); end what listens there (`ss -ltnp 'sport = :{port}'`)") from e
        with listener:
            fd = listener.fileno()
            python = (sys.executable, "-S", "-E", str(_FORWARDER), str(fd), target)
            self._start(name, ["nsenter", f"--net={self.layout.namespaces.net}", "--", *python], fingerprint, pass_fds=[fd])

    def _forward_port(self, name: str) -> int:
        memory = self._need_memory()
        return memory.api_port if name == "forward-api" else memory.router_port

    def _images(self) -> str | None:
        pause = binaries.ensure(binaries.PAUSE)
        wanted = [hostview.pause_image(pause), hostview.skeleton_image()]
        listed = self._ctr("images", "ls").stdout
        have = {(w[0], w[2]) for line in listed.splitlines()[1:] if len(w := line.split()) > 2}
        missing = [i for i in wanted if (i.name, i.digest) not in have]
        for image in missing:
            archive = self.layout.state / "image.tar"
            archive.write_bytes(image.archive)
            self._ctr("images", "import", str(archive))
            archive.unlink()
        return ", ".join(i.name for i in missing) or None

    def _node(self) -> str | None:
        api = self._api()

        def node() -> bool:
            # A Ready that an earlier life of this cluster wrote counts only once this kubelet has said it again.
            found = api.object(f"/api/v1/nodes/{NODE_NAME}")
            return found is not None and is_true(found, "Ready") and self._said_by_this_kubelet(found)

        def account() -> bool:
            return api.object("/api/v1/namespaces/default/serviceaccounts/default") is not None

        def dns() -> bool:
            return self._http_ok(NODE_IP, components.DNS_READY_PORT, "/ready")

        if node() and account() and dns():
            return None
        self._await("kubelet", node)
        self._await("controller-manager", account)
        self._await("coredns", dns)
        return "Ready"

    def _said_by_this_kubelet(self, node: Mapping[str, Any]) -> bool:
        record = processes.read_record(self._record("kubelet"))
        beats = [c["lastHeartbeatTime"] for c in node["status"]["conditions"] if c["type"] == "Ready"]
        if record is None or not beats:
            return False
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        started = time.time() - uptime + record.started_ticks / os.sysconf("SC_CLK_TCK")
        return datetime.fromisoformat(beats[0]).timestamp() + 1 >= started  # the API cuts to whole seconds

    def _await(self, component: str, probe: Callable[[], bool]) -> None:
        def died() -> str | None:
            record = processes.read_record(self._record(component))
            if record is not None and processes.is_alive(record):
                return None
            log = self.layout.log / f"{component}.log"
            return f"{component} ended while starting; see {log}\n{processes.tail(log)}"

        wait_until(component, probe, limit_s=_READY_LIMIT_S, still_possible=died)

    def _api(self) -> AdminApi:
        return AdminApi(self.layout.pki, self._need_memory().api_port)

    def _http_ok(self, host: str, port: int, path: str) -> bool:
        try:
            with self.connect(host, port, timeout_s=2.0) as s:
                s.sendall(f"GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
                return b" 200 " in s.recv(64)
        except OSError:
            return False

    def _ctr(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = self.layout.namespaces.enter("ctr", "-a", CONTAINERD_SOCKET, "-n", "k8s.io", *arguments)
        result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if check and result.returncode != 0:
            raise ClusterError(f"`ctr {' '.join(arguments)}` failed: {result.stderr.strip()}")
        return result

    def _containerd_answers(self) -> bool:
        return self._ctr("version", check=False).returncode == 0

    def _record(self, component: str) -> Path:
        return self.layout.run / component

    def _need_settings(self) -> Settings:
        assert self._settings is not None, "the step `binaries` runs first"
        return self._settings

    def _need_memory(self) -> Memory:
        memory = self.memory
        assert memory is not None, "up() remembers the ports first"
        return memory

    # ---- down ----

    def down(self) -> bool:
        """Ends and removes everything of this cluster; only the cache stays. True when there was something. Works on half-dead and damaged ones.

        Raises ClusterError when the folder is not a cluster's.
        """
        layout = self.layout
        mounts = cgroups.gather_cgroups().mounts
        folders = cgroups.cluster_folders(mounts, layout.cgroup)
        if not layout.state.exists() and not folders:
            return False
        if not folders and not layout.memory_file.exists():
            layout.recall()  # refuses a stranger's folder; ours may be empty but for the lock
        if os.geteuid() != 0:
            raise ClusterError("removing the local cluster needs root: run it with sudo")
        with layout.locked():
            self._timed("processes", lambda: processes.kill_all(folders, limit_s=20.0))
            self._timed("mounts", layout.namespaces.remove)
            self._timed("cgroups", lambda: cgroups.remove_cgroups(folders, limit_s=10.0))
            self._timed("files", lambda: remove_tree(layout.state))
        return True

    def _timed(self, name: str, work: Callable[[], object]) -> None:
        started = time.monotonic()
        work()
        self._progress.say(f"  {name:<20} {time.monotonic() - started:6.1f} s  removed")


def remove_tree(folder: Path) -> None:
    """Removes a folder, its memory last: a `down` that is killed on the way finds it again. Refuses to cross into a mount."""
    mountinfo = Path("/proc/self/mountinfo").read_text()
    left = [line.split(" ", 5)[4] for line in mountinfo.splitlines() if line.split(" ", 5)[4].startswith(f"{folder}/")]
    if left:
        raise ClusterError(f"{left[0]} is still mounted; unmount it (`umount -l {left[0]}`) and run `radixfleet local down` again")
    for entry in folder.iterdir():
        if entry.name not in ("cluster.json", "lock"):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    shutil.rmtree(folder)
