"""The state folder: only ours is touched, it is written whole, and one process at a time works on it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fleet_contract.cache_folder import cache_folder
from fleet_local.cluster import remove_tree
from fleet_local.errors import ClusterError
from fleet_local.layout import Layout, Memory, write_atomically


def test_two_clusters_never_share_a_name_and_one_keeps_its_own(tmp_path: Path) -> None:
    a, b = Layout.of(tmp_path / "a"), Layout.of(tmp_path / "b")
    assert a.id != b.id and a.cgroup != b.cgroup
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert Layout.of(tmp_path / "link").id == a.id == Layout.of(tmp_path / "b" / ".." / "a").id


@pytest.mark.parametrize("folder", ["/", "~", "/run/x", "/var/lib", str(cache_folder())])
def test_a_folder_that_is_not_its_own_is_refused(folder: str) -> None:
    with pytest.raises(ClusterError, match=r"--state .*: must be a folder of its own"):
        Layout.of(Path(folder))


def test_what_is_remembered_is_recalled(tmp_path: Path) -> None:
    layout = Layout.of(tmp_path / "c")
    assert layout.recall() is None
    layout.remember(Memory(api_port=1, router_port=2))
    assert layout.recall() == Memory(api_port=1, router_port=2)


def test_a_strangers_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "letters").touch()
    with pytest.raises(ClusterError, match="is not empty \\(letters\\) and not a cluster"):
        Layout.of(tmp_path).recall()
    assert (tmp_path / "letters").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"api_port": 1}', '{"api_port": "x", "router_port": 1, "schema": 1}'])
def test_a_damaged_memory_says_how_to_get_rid_of_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "cluster.json").write_text(text)
    with pytest.raises(ClusterError, match=r"is damaged .* `radixfleet local down --state"):
        Layout.of(tmp_path).recall()


def test_a_state_of_another_version_says_how_to_get_rid_of_it(tmp_path: Path) -> None:
    Layout.of(tmp_path).remember(Memory(1, 2, schema=99))
    with pytest.raises(ClusterError, match=r"another version .*`radixfleet local down"):
        Layout.of(tmp_path).recall()


def test_a_file_that_says_it_already_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    assert write_atomically(path, "x")
    before = path.stat()
    assert not write_atomically(path, "x")
    assert path.stat() == before
    assert write_atomically(path, "y") and path.read_text() == "y" and [p.name for p in path.parent.iterdir()] == ["b"]


HOLDER = """
import sys
from pathlib import Path
from fleet_local.layout import Layout
with Layout.of(Path(sys.argv[1])).locked():
    print("held", flush=True)
    input()
"""


def test_a_second_command_waits_and_a_killed_one_holds_nothing(tmp_path: Path) -> None:
    layout = Layout.of(tmp_path / "c")
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(layout.state)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(ClusterError, match="another radixfleet local up/down works on"), layout.locked(wait_s=0):
            pass
        holder.kill()
        holder.wait()
        with layout.locked(wait_s=5):
            pass


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_anew(tmp_path: Path) -> None:
    layout = Layout.of(tmp_path / "c")
    with layout.locked():
        remove_tree(layout.state)
        with layout.locked(wait_s=5):
            assert (layout.state / "lock").exists()


def test_removing_takes_all_that_is_in_a_folder_and_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").touch()
    state = tmp_path / "c"
    (state / "disk" / "deep").mkdir(parents=True)
    (state / "disk" / "file").touch()
    (state / "link").symlink_to(tmp_path / "outside")
    (state / "cluster.json").touch()
    remove_tree(state)
    assert not state.exists() and (tmp_path / "outside" / "precious").exists()
