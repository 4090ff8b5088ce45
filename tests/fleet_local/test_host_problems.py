"""What keeps a cluster from starting is told in one line with a way out; ports and disks are judged from facts."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet_local.cgroups import CgroupFacts, CgroupMount
from fleet_local.facts import MIN_DISK_BYTES, TOOLS, HostFacts, choose_port, gather, port_is_free, problems, snapshotter

GOOD = HostFacts(
    platform="linux",
    uid=0,
    missing_tools=(),
    state="/var/tmp/c",
    disk_free_bytes=MIN_DISK_BYTES,
    cgroups=CgroupFacts((CgroupMount("/sys/fs/cgroup", "cgroup2"),), ("cpu", "cpuset", "memory", "pids"), ("cpu",)),
)


def test_a_good_host_has_no_problem() -> None:
    assert problems(GOOD) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"platform": "darwin"}, ["needs Linux (this is darwin)", "radixfleet serve", "--kubeconfig"]),
        ({"uid": 1000}, ["needs root (this is uid 1000)", "sudo", "radixfleet serve", "--kubeconfig"]),
        (
            {"missing_tools": ("ctr", "containerd", "conntrack")},
            ["missing Debian packages: conntrack containerd;", "apt-get install -y conntrack containerd"],
        ),
        ({"disk_free_bytes": 2**30}, ["no disk space: 1.0 GiB free at /var/tmp/c, 2 GiB are needed", "--state"]),
        ({"cgroups": CgroupFacts(())}, ["no cgroups are mounted"]),
    ],
    ids=["not Linux", "no root", "packages", "disk", "cgroups"],
)
def test_each_trouble_is_one_line_that_says_what_to_do(change: dict[str, Any], words: list[str]) -> None:
    found = problems(replace(GOOD, **change))
    assert len(found) == 1 and "\n" not in found[0]
    assert all(w in found[0] for w in words), found


def test_without_root_nothing_else_is_asked_for() -> None:
    found = problems(replace(GOOD, uid=1, missing_tools=tuple(TOOLS), disk_free_bytes=0))
    assert len(found) == 1 and "needs root" in found[0]


def test_all_troubles_of_a_root_user_are_told_at_once() -> None:
    assert len(problems(replace(GOOD, missing_tools=("runc",), disk_free_bytes=0, cgroups=CgroupFacts(())))) == 3


def test_the_facts_of_this_machine_can_be_read_by_anybody(tmp_path: Path) -> None:
    facts = gather(tmp_path / "not" / "there")
    assert facts.disk_free_bytes > 0 and set(facts.missing_tools) <= set(TOOLS)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"asked": None, "remembered": None, "ours": False, "free": [80]}, 80),
        ({"asked": None, "remembered": None, "ours": False, "free": []}, 99),
        ({"asked": None, "remembered": 85, "ours": True, "free": [80]}, 85),
        ({"asked": None, "remembered": 85, "ours": False, "free": [80, 85]}, 85),
        ({"asked": 90, "remembered": None, "ours": False, "free": [80, 90]}, 90),
        ({"asked": 90, "remembered": 90, "ours": True, "free": []}, 90),
        ({"asked": 90, "remembered": 85, "ours": True, "free": [90]}, 90),
    ],
    ids=["default", "default taken", "remembered, ours", "remembered, free", "asked", "asked and ours already", "asked for another"],
)
def test_a_port_is_kept_or_chosen(arguments: dict[str, Any], expected: int) -> None:
    assert choose_port(**arguments, default=80, spare=99) == expected


@pytest.mark.parametrize(
    ("arguments", "port"),
    [({"asked": 90, "remembered": None, "ours": False, "free": [80]}, 90), ({"asked": None, "remembered": 85, "ours": False, "free": [80]}, 85)],
    ids=["asked", "remembered"],
)
def test_a_taken_port_that_was_asked_for_or_told_before_is_an_error_not_a_surprise(arguments: dict[str, Any], port: int) -> None:
    answer = choose_port(**arguments, default=80, spare=99)
    assert isinstance(answer, str) and f"port {port} of 127.0.0.1" in answer and "is taken" in answer and "\n" not in answer


def test_a_port_somebody_listens_on_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not port_is_free(port)
    assert port_is_free(port)


@pytest.mark.parametrize(
    ("kind", "expected"), [("ext4", "overlayfs"), ("xfs", "overlayfs"), ("btrfs", "overlayfs"), ("overlay", "native"), ("fuse-overlayfs", "native")]
)
def test_layers_are_plain_copies_only_where_the_disk_is_an_overlay_itself(kind: str, expected: str) -> None:
    mountinfo = f"1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 8:2 / /var/tmp rw shared:1 - {kind} /dev/b rw\n3 1 8:3 / /var/tmp2 rw - overlay o rw"
    assert snapshotter(mountinfo, Path("/var/tmp/cluster")) == expected
