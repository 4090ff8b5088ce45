"""Which cgroups a cluster takes follows from facts alone, on v1, hybrid and v2 hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet_local.cgroups import NEEDED_V1, NEEDED_V2, CgroupFacts, CgroupMount, CgroupPlan, choose_cgroups, component_folder, parse_mounts

V1_LINES = """\
31 23 0:26 / /sys/fs/cgroup ro,nosuid shared:9 - tmpfs tmpfs ro,mode=755
32 31 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:15 - cgroup cgroup rw,cpu,cpuacct
33 31 0:28 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset,clone_children
34 31 0:29 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
35 31 0:30 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
36 31 0:31 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,xattr,name=systemd
"""
HYBRID_LINE = "37 31 0:32 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
V2_LINE = "30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def v1_facts(text: str) -> CgroupFacts:
    return CgroupFacts(parse_mounts(text), cpus=4)


def v2_facts(line: str = V2_LINE, controllers: str = "cpuset cpu io memory hugetlb pids", enabled: str = "cpu memory pids") -> CgroupFacts:
    return CgroupFacts(parse_mounts(line), tuple(controllers.split()), tuple(enabled.split()), cpus=4)


@pytest.mark.parametrize("text", [V1_LINES, V1_LINES + HYBRID_LINE], ids=["v1", "hybrid"])
def test_v1_and_hybrid_hosts_get_a_folder_in_every_v1_hierarchy(text: str) -> None:
    plan = choose_cgroups(v1_facts(text), "radixfleet-1")
    assert isinstance(plan, CgroupPlan)
    assert plan.version == 1
    assert [str(f) for f in plan.folders] == [f"/sys/fs/cgroup/{c}/radixfleet-1" for c in ("cpu,cpuacct", "cpuset", "memory", "pids", "systemd")]
    assert plan.tracking == Path("/sys/fs/cgroup/pids/radixfleet-1")
    assert plan.copy_cpuset == (Path("/sys/fs/cgroup/cpuset/radixfleet-1"),)
    assert plan.enable == ()
    assert plan.root == "/radixfleet-1"


def test_pods_count_as_much_beside_other_processes_as_on_a_node_of_kubelet() -> None:
    plan = choose_cgroups(v1_facts(V1_LINES), "radixfleet-1")
    assert isinstance(plan, CgroupPlan)
    assert plan.cpu == (Path("/sys/fs/cgroup/cpu,cpuacct/radixfleet-1/cpu.shares"), 4096)


def test_v2_hosts_get_one_folder_and_the_controllers_that_are_off_are_switched_on() -> None:
    plan = choose_cgroups(v2_facts(), "radixfleet-1")
    folder = Path("/sys/fs/cgroup/radixfleet-1")
    assert plan == CgroupPlan(2, "/radixfleet-1", (folder,), folder, enable=("cpuset",), cpu=(folder / "cpu.weight", 156))


def test_on_v2_no_process_lives_in_a_folder_that_has_children() -> None:
    plan = choose_cgroups(v2_facts(), "radixfleet-1")
    assert isinstance(plan, CgroupPlan)
    folders = [component_folder(plan, c) for c in ("etcd", "kubelet")]
    assert folders[0].parent == folders[1].parent != plan.tracking
    assert not any(a != b and a.is_relative_to(b) for a in folders for b in folders)


@pytest.mark.parametrize("missing", NEEDED_V2)
def test_v2_without_a_controller_says_which(missing: str) -> None:
    answer = choose_cgroups(v2_facts(controllers=" ".join(c for c in NEEDED_V2 if c != missing)), "x")
    assert isinstance(answer, str) and f"no controller {missing};" in answer


@pytest.mark.parametrize("missing", NEEDED_V1)
def test_v1_without_a_controller_says_which(missing: str) -> None:
    mounts = tuple(CgroupMount(f"/sys/fs/cgroup/{c}", "cgroup", (c,)) for c in NEEDED_V1 if c != missing)
    answer = choose_cgroups(CgroupFacts(mounts), "x")
    assert isinstance(answer, str) and f"no controller {missing} mounted" in answer


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (CgroupFacts(()), "no cgroups are mounted"),
        (v2_facts(V2_LINE.replace("cgroup rw,nosuid", "cgroup ro,nosuid")), "/sys/fs/cgroup is read-only"),
        (v1_facts(V1_LINES.replace("memory rw,", "memory ro,")), "/sys/fs/cgroup/memory is read-only"),
        (v1_facts(HYBRID_LINE), "no cgroups are mounted"),
    ],
    ids=["none", "v2 read-only", "v1 read-only", "cgroup2 elsewhere only"],
)
def test_a_host_without_usable_cgroups_is_told_in_one_line(facts: CgroupFacts, words: str) -> None:
    answer = choose_cgroups(facts, "x")
    assert isinstance(answer, str) and words in answer and "\n" not in answer


def test_mount_options_are_not_taken_for_controllers() -> None:
    by_path = {m.path: m for m in parse_mounts(V1_LINES)}
    assert by_path["/sys/fs/cgroup/cpuset"].controllers == ("cpuset",)
    assert by_path["/sys/fs/cgroup/systemd"].controllers == ("name=systemd",)
    assert "/sys/fs/cgroup" not in by_path
