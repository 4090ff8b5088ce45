"""The network and mount namespace of a cluster.

Everything of the cluster runs in both. No route, iptables rule or address of the host changes, and what kubelet, containerd, runc and CNI hard-code
(/run/containerd, /var/lib/kubelet, /var/lib/cni, /var/log/containers, /run/xtables.lock …) is private: it lies on tmpfs or in the state folder, is
shared with no other cluster, and goes with the last process. The host has three mounts of a cluster, all below its state folder.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import socket
import subprocess
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fleet_local.errors import ClusterError

NODE_IP: Final = "10.123.0.10"
COVERED: Final = ("/run", "/var/log", "/var/lib")  # each becomes a tmpfs in the cluster's mount namespace
_MARK: Final = "/run/radixfleet-ready"  # written last, inside: a half-made namespace is made again
_CLONE_NEWNET: Final = 0x40000000


@dataclass(frozen=True, slots=True)
class Namespaces:
    """Where the two namespaces are pinned: files in `folder`, which is a private bind mount of itself."""

    folder: Path

    @property
    def net(self) -> Path:
        return self.folder / "net"

    @property
    def mnt(self) -> Path:
        return self.folder / "mnt"

    def enter(self, *command: str) -> list[str]:
        """The command line that runs a command inside both. Not `ip netns exec`: that remounts /sys and loses the cgroups."""
        return ["nsenter", f"--net={self.net}", f"--mount={self.mnt}", "--", *command]

    def identity(self) -> str:
        """Changes when the namespaces are made anew, so that processes of the old ones are replaced."""
        return f"{self.net.stat().st_ino}.{self.mnt.stat().st_ino}"

    def exist(self) -> bool:
        """True when both are pinned and completely set up."""
        mounts = mount_points(Path("/proc/self/mountinfo").read_text())
        if not {str(self.net), str(self.mnt)} <= set(mounts):
            return False
        return subprocess.run(self.enter("test", "-e", _MARK), capture_output=True).returncode == 0

    def make(self, *, binds: Sequence[tuple[Path, str]], keep: Iterable[Path]) -> None:
        """Makes both anew.

        Args:
            binds: (folder of the host, place inside) for what must be on disk.
            keep: folders of the host that stay visible although they lie below a covered one.
        """
        self.remove()
        self.folder.mkdir(parents=True, exist_ok=True)
        for pin in (self.net, self.mnt):
            pin.touch()
        for source, _ in binds:
            source.mkdir(parents=True, exist_ok=True)
        f = str(self.folder)
        _run("mount", "--bind", f, f)
        _run("mount", "--make-private", f)  # a mount namespace can only be pinned on a private mount
        _run(
            "unshare",
            f"--mount={self.mnt}",
            f"--net={self.net}",
            "--propagation",
            "slave",
            "sh",
            "-c",
            setup_script(binds, keep, self.folder / "stage"),
        )

    def remove(self) -> None:
        """Unpins both; they end with their last process."""
        for point in sorted(mount_points(Path("/proc/self/mountinfo").read_text()), reverse=True):
            if point == str(self.folder) or point.startswith(f"{self.folder}/"):
                subprocess.run(["umount", "-l", point], capture_output=True)

    def open_socket(self, family: socket.AddressFamily = socket.AF_INET, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
        """A socket of the cluster's network for this process; a thread enters the namespace and makes it. Raises OSError."""
        made: list[socket.socket] = []
        failed: list[OSError] = []

        def inside() -> None:
            try:
                fd = os.open(self.net, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET) != 0:
                        raise OSError(ctypes.get_errno(), f"cannot enter {self.net}")
                finally:
                    os.close(fd)
                made.append(socket.socket(family, kind))
            except OSError as e:
                failed.append(e)

        thread = threading.Thread(target=inside)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]
        return made[0]

    def connect(self, host: str, port: int, *, timeout_s: float = 5.0) -> socket.socket:
        """A TCP connection to an address inside the cluster (node, pod or service). Raises OSError."""
        s = self.open_socket()
        s.settimeout(timeout_s)
        try:
            s.connect((host, port))
        except OSError:
            s.close()
            raise
        return s


def setup_script(binds: Sequence[tuple[Path, str]], keep: Iterable[Path], stage: Path) -> str:
    """The shell script that runs once inside the new namespaces. Pure."""
    lines = ["set -e", "mount --make-rshared /", f"mkdir -p {shlex.quote(str(stage))}", f"s={shlex.quote(str(stage))}"]
    kept = sorted(set(keep))
    for cover in COVERED:
        lines.append('mount -t tmpfs -o mode=755 radixfleet "$s"')
        for path in kept:
            if path.is_relative_to(cover):
                inner = shlex.quote(str(path.relative_to(cover)))
                lines += [f'mkdir -p "$s"/{inner}', f'mount --rbind {shlex.quote(str(path))} "$s"/{inner}']
        lines += [f'mount --rbind "$s" {cover}', 'umount -l "$s"']
    for source, target in binds:
        lines += [f"mkdir -p {target}", f"mount --bind {shlex.quote(str(source))} {target}"]
    lines += [
        "mkdir -p /run/netns /run/lock",
        "ip link set lo up",
        "ip link add node0 type veth peer name node0p",  # `dummy` devices may be missing in a kernel
        "ip link set node0p up",
        f"ip addr add {NODE_IP}/24 dev node0",
        "ip link set node0 up",
        "ip route add default dev node0",
        "echo 1 > /proc/sys/net/ipv4/ip_forward",
        f"touch {_MARK}",
    ]
    return "\n".join(lines)


def mount_points(mountinfo: str) -> list[str]:
    """All mount points of a /proc/self/mountinfo text, with its octal escapes undone (proc(5))."""
    return [_unescape(line.split(" ", 5)[4]) for line in mountinfo.splitlines()]


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), text)


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise ClusterError(
            f"`{' '.join(command[:4])}` failed: {result.stderr.strip()}; needs the capability SYS_ADMIN (in a container: --privileged)"
        )
