"""`radixfleet local`: what is said in one line when something is wrong, and arguments that are passed on untouched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleet_local import binaries, cli, facts
from fleet_local.cgroups import CgroupFacts
from fleet_local.errors import ClusterError
from fleet_local.namespaces import mount_points, setup_script

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="is about root")


@pytest.mark.parametrize(
    ("words", "rest"),
    [
        (["kubectl", "get", "pods", "--state", "x"], ["get", "pods", "--state", "x"]),
        (["--state", "/s", "kubectl", "-n", "a", "logs", "b", "--help"], ["-n", "a", "logs", "b", "--help"]),
        (["--state=/s", "helm", "list"], ["list"]),
        (["--state", "helm", "helm", "kubectl"], ["kubectl"]),
        (["up", "--api-port", "1"], []),
        (["logs", "kubectl"], []),
        ([], []),
    ],
)
def test_what_follows_kubectl_and_helm_is_theirs(words: list[str], rest: list[str]) -> None:
    assert words[cli._passed_on(words) :] == rest


def say(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("command", ["status", "down"])
def test_without_a_cluster_status_and_down_say_so(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str) -> None:
    code, out, _ = say(capsys, "--state", str(tmp_path / "c"), command)
    assert code == (1 if command == "status" else 0)
    assert out.startswith(f"there is no cluster at {tmp_path}/c")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("command", [["kubectl", "get", "pods"], ["logs", "etcd"]])
def test_without_a_cluster_the_others_fail_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str]) -> None:
    code, _, err = say(capsys, "--state", str(tmp_path / "c"), *command)
    assert code == 1 and err.startswith("radixfleet local ") and err.count("\n") == 1


@pytest.mark.parametrize("command", ["up", "down", "status"])
def test_a_folder_with_other_things_in_it_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str) -> None:
    (tmp_path / "letters").touch()
    code, _, err = say(capsys, "--state", str(tmp_path), command)
    assert code == 1 and "is not empty (letters) and not a cluster" in err
    assert [p.name for p in tmp_path.iterdir()] == ["letters"]


@pytest.mark.parametrize(
    ("host", "words"),
    [
        (facts.HostFacts("darwin", 0, (), "/s", 0, CgroupFacts(())), "needs Linux"),
        (facts.HostFacts("linux", 1000, (), "/s", 0, CgroupFacts(())), "needs root"),
        (facts.HostFacts("linux", 0, ("runc",), "/s", 2**40, CgroupFacts(())), "missing Debian packages: runc"),
        (facts.HostFacts("linux", 0, (), "/s", 1, CgroupFacts(())), "no disk space"),
    ],
    ids=["not Linux", "no root", "packages", "disk"],
)
def test_up_says_why_it_cannot_start_and_leaves_no_trace(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host: facts.HostFacts, words: str
) -> None:
    monkeypatch.setattr(facts, "gather", lambda _: host)
    code, _, err = say(capsys, "--state", str(tmp_path / "c"), "up")
    assert code == 1 and words in err.splitlines()[0]
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["up", "--api-port", "x"], ["logs", "nobody"]])
def test_wrong_usage_ends_with_2(argv: list[str]) -> None:
    result = subprocess.run([sys.executable, "-m", "fleet_local.cli", *argv], capture_output=True, text=True)
    assert result.returncode == 2 and "usage:" in result.stderr


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("go version go1.26.8 linux/amd64", (1, 26)),
        ("go version go1.27rc1 linux/arm64", (1, 27)),
        ("go version devel go1.28-abc linux/amd64", (1, 28)),
        ("gccgo 12", None),
        ("", None),
    ],
)
def test_the_version_of_go_is_read(text: str, version: tuple[int, int] | None) -> None:
    assert binaries.parse_go_version(text) == version


def test_a_binary_is_another_when_pins_mains_or_toolchain_change(tmp_path: Path) -> None:
    (tmp_path / "cmd" / "a").mkdir(parents=True)
    for name in ("go.mod", "go.sum", "cmd/a/main.go"):
        (tmp_path / name).write_text(name)
    seen = {binaries.module_hash(tmp_path, "go1.26.0"), binaries.module_hash(tmp_path, "go1.26.1")}
    for name in ("go.mod", "go.sum", "cmd/a/main.go"):
        (tmp_path / name).write_text("changed " + name)
        seen.add(binaries.module_hash(tmp_path, "go1.26.0"))
    assert len(seen) == 5
    assert binaries.module_hash(tmp_path, "go1.26.0") in seen


def test_a_folder_of_ready_programs_without_them_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(binaries.ENV_READY, str(tmp_path))
    with pytest.raises(ClusterError, match=r"RADIXFLEET_CLUSTER_BIN=.*there is no file radixfleet-cluster"):
        binaries.ensure(binaries.CLUSTER)
    (tmp_path / binaries.CLUSTER).touch()
    assert binaries.ensure(binaries.CLUSTER) == tmp_path / binaries.CLUSTER


def test_mount_points_with_odd_names_are_read() -> None:
    assert mount_points("1 2 3:4 / /a\\040b\\134c rw - ext4 x rw\n1 2 3:4 / /d rw shared:1 - ext4 x rw") == ["/a b\\c", "/d"]


def test_a_state_below_a_covered_folder_stays_visible() -> None:
    script = setup_script([(Path("/s p/k"), "/var/lib/kubelet")], [Path("/var/lib/jenkins/x")], Path("/s p/stage"))
    lines = script.splitlines()
    covered = lines.index('mount --rbind "$s" /var/lib')
    assert lines.index('mount --rbind /var/lib/jenkins/x "$s"/jenkins/x') < covered < lines.index("mount --bind '/s p/k' /var/lib/kubelet")
    subprocess.run(["sh", "-n", "-c", script], check=True)
