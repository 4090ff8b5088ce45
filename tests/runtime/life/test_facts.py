"""Threads, drain deadline, identity and restarts as functions of facts."""

from __future__ import annotations

import signal
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_contract.cpus import choose_threads, cpu_quota
from fleet_contract.names import ANNOTATION_DRAINING, ENV_NAMESPACE, ENV_POD_UID
from fleet_runtime.errors import StartError
from fleet_runtime.supervisor.facts import annotation, drain_seconds, identity_from_env
from fleet_runtime.supervisor.policy import BACKOFF_S, Backoff, SchedulerBudget, death_in_words
from fleet_runtime.supervisor.prepare import make_run_dir

V2 = "0::/kubepods/pod1/c1\n"
V1 = "11:memory:/x\n4:cpu,cpuacct:/kubepods/pod1\n1:name=systemd:/\n"
HYBRID = "4:cpu,cpuacct:/pod\n0::/pod\n"


@pytest.mark.parametrize(
    ("name", "cgroup", "files", "quota"),
    [
        ("no limit on v2", V2, {"/sys/fs/cgroup/kubepods/pod1/c1/cpu.max": "max 100000\n"}, None),
        ("own limit on v2", V2, {"/sys/fs/cgroup/kubepods/pod1/c1/cpu.max": "150000 100000\n"}, 1.5),
        ("inside a container the own group is the root", V2, {"/sys/fs/cgroup/cpu.max": "200000 100000"}, 2.0),
        (
            "the tightest ancestor counts",
            V2,
            {"/sys/fs/cgroup/kubepods/cpu.max": "50000 100000", "/sys/fs/cgroup/kubepods/pod1/cpu.max": "200000 100000"},
            0.5,
        ),
        (
            "v1",
            V1,
            {
                "/sys/fs/cgroup/cpu,cpuacct/kubepods/pod1/cpu.cfs_quota_us": "400000",
                "/sys/fs/cgroup/cpu,cpuacct/kubepods/pod1/cpu.cfs_period_us": "100000",
            },
            4.0,
        ),
        ("v1 through its short mount", V1, {"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 1.0),
        ("v1 without limit", V1, {"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, None),
        ("hybrid", HYBRID, {"/sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us": "300000", "/sys/fs/cgroup/cpu/pod/cpu.cfs_period_us": "100000"}, 3.0),
        ("nothing readable", V2, {}, None),
        ("nonsense", "what\n:::\n", {"/sys/fs/cgroup/cpu.max": "a b c"}, None),
    ],
)
def test_the_quota_is_found_on_both_kinds_of_cgroups(name: str, cgroup: str, files: dict[str, str], quota: float | None) -> None:
    assert cpu_quota(cgroup, files.get) == quota


@pytest.mark.parametrize(
    ("asked", "affinity", "quota", "threads"), [(0, 8, None, 8), (0, 8, 2.9, 2), (0, 8, 0.1, 1), (0, 2, 16.0, 2), (5, 2, 1.0, 5)]
)
def test_threads(asked: int, affinity: int, quota: float | None, threads: int) -> None:
    assert choose_threads(asked, affinity, quota) == threads


NOW = datetime(2026, 11, 29, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("podinfo", "seconds"),
    [
        (None, 300),
        ("", 300),
        ('radixfleet.io/draining="2026-11-29T12:00:20Z"\n', 20),
        ('a="b"\nradixfleet.io/draining="2026-11-29T12:00:20.500000Z"\nz="\\"q\\"\\n"\n', 20.5),
        ('radixfleet.io/draining="2026-11-29T13:00:20+01:00"', 20),
        ('radixfleet.io/draining="2026-11-29T12:00:20"', 20),
        ('radixfleet.io/draining="2026-11-29T14:00:00Z"', 300),
        ('radixfleet.io/draining="2026-11-29T11:00:00Z"', 1),
        ('radixfleet.io/draining="soon"', 300),
        ('xradixfleet.io/draining="2026-11-29T12:00:20Z"', 300),
    ],
)
def test_a_drain_ends_with_the_flag_or_the_pods_deadline(podinfo: str | None, seconds: float) -> None:
    assert drain_seconds(podinfo, 300, NOW) == seconds


def test_annotations_are_unescaped() -> None:
    assert annotation('k="a\\"b\\\\c\\n"', "k") == 'a"b\\c\n'
    assert annotation(f'{ANNOTATION_DRAINING}="x"', "draining") is None


@given(st.text(max_size=200))
def test_no_podinfo_breaks_a_drain(text: str) -> None:
    assert 0 < drain_seconds(text, 300, NOW) <= 300


def test_identity_comes_from_the_pod_or_is_new() -> None:
    who = identity_from_env({ENV_POD_UID: "u-1", ENV_NAMESPACE: "ns"})
    assert (who.pod_uid, who.namespace, who.service) == ("u-1", "ns", "")
    assert identity_from_env({}).pod_uid != identity_from_env({}).pod_uid


def test_the_scheduler_is_restarted_three_times_in_ten_minutes() -> None:
    budget = SchedulerBudget()
    assert [budget.take(t) for t in (0, 1, 2, 3)] == [True, True, True, False]
    assert budget.take(601), "two of them are old now"
    assert budget.take(602)
    assert budget.take(603)
    assert not budget.take(604)


def test_back_off_grows_is_bounded_and_forgets() -> None:
    backoff = Backoff()
    delays = [backoff.delay(1.0) for _ in range(20)]
    assert delays == sorted(delays) and delays[0] == 0 and delays[-1] == BACKOFF_S[-1]
    assert backoff.delay(120.0) == 0


def test_a_path_that_is_too_long_for_sockets_is_left_for_tmp(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    folder = Path(make_run_dir({"TMPDIR": str(deep)}))
    assert folder.parent == Path("/tmp")
    folder.rmdir()
    folder = Path(make_run_dir({"TMPDIR": str(tmp_path)}))
    assert folder.parent == tmp_path
    with pytest.raises(StartError) as e:
        make_run_dir({"TMPDIR": "/proc"})
    assert e.value.reason == "CacheUnwritable" and "TMPDIR" in e.value.message


def test_deaths_have_words() -> None:
    assert death_in_words("http", 7) == "http exited with code 7"
    assert death_in_words("scheduler", -signal.SIGKILL) == "scheduler was killed by SIGKILL (often: out of memory)"
    assert death_in_words("scheduler", -signal.SIGSEGV) == "scheduler was killed by SIGSEGV"
