"""What containers see of the host, and the images that are skeletons around it."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from fleet_contract.names import BUNDLED_MODELS_DIR, NATIVE_LIBRARY_DIR
from fleet_local.hostview import IMAGE, Bind, Image, base_spec, closed_to_others, host_view, pause_image, skeleton_image, this_host


def targets(binds: list[Bind]) -> list[str]:
    return [b.target for b in binds]


def test_a_folder_inside_another_is_not_bound_twice(tmp_path: Path) -> None:
    folders = ["/usr", "/usr/local", "/srv/app", "/srv/app2", "/srv/app", "/srv/app/.venv/"]
    binds = host_view(folders, {BUNDLED_MODELS_DIR: tmp_path, NATIVE_LIBRARY_DIR: tmp_path})
    assert targets(binds) == ["/srv/app", "/srv/app2", "/usr", "/opt/radixfleet/models", "/opt/radixfleet/native"]


def test_a_link_is_bound_under_its_own_name_to_what_it_means(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    binds = host_view([str(tmp_path / "link")], {BUNDLED_MODELS_DIR: tmp_path})
    assert binds[0] == Bind(str(tmp_path / "real"), str(tmp_path / "link"))


def test_the_interpreter_and_the_packages_of_this_checkout_are_in_view() -> None:
    seen = [Path(t) for t in targets(this_host())]
    for needed in (Path(__file__).parents[2] / "e2e" / "fleet_local", Path("/usr/bin")):
        assert any(needed.is_relative_to(s) for s in seen), needed
    assert Path.home() not in seen and Path("/") not in seen


@pytest.mark.parametrize(("mode", "closed"), [(0o755, False), (0o750, True), (0o711, True), (0o754, True)])
def test_a_folder_that_pods_cannot_read_is_named(tmp_path: Path, mode: int, closed: bool) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    folder.chmod(mode)
    assert closed_to_others([Bind(str(folder), "/x")]) == ([str(folder)] if closed else [])


def test_binds_are_added_to_what_the_spec_has_already() -> None:
    spec = {"process": {"cwd": "/", "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 1024, "soft": 1024}]}, "mounts": [{"destination": "/proc"}]}
    made = base_spec(spec, [Bind("/a", "/b")])
    assert made["process"] == {"cwd": "/", "rlimits": []}, "pods have the machine's limit of open files"
    assert made["mounts"] == [{"destination": "/proc"}, {"destination": "/b", "type": "bind", "source": "/a", "options": ["rbind", "ro"]}]
    assert spec["mounts"] == [{"destination": "/proc"}]


def unpack(image: Image) -> tuple[dict[str, object], tarfile.TarFile]:
    """Follows index, manifest, config and layer by digest, as a client does, and returns config and layer."""
    archive = tarfile.open(fileobj=io.BytesIO(image.archive))  # noqa: SIM115 - in memory

    def read(name: str) -> bytes:
        found = archive.extractfile(name)
        assert found is not None
        return found.read()

    def blob(descriptor: dict[str, object]) -> bytes:
        digest = str(descriptor["digest"])
        data = read(f"blobs/sha256/{digest.removeprefix('sha256:')}")
        assert hashlib.sha256(data).hexdigest() == digest.removeprefix("sha256:") and len(data) == descriptor["size"]
        return data

    [named] = json.loads(read("index.json"))["manifests"]
    assert named["digest"] == image.digest and named["annotations"]["io.containerd.image.name"] == image.name
    manifest = json.loads(blob(named))
    layer = blob(manifest["layers"][0])
    config = json.loads(blob(manifest["config"]))
    assert config["rootfs"]["diff_ids"] == ["sha256:" + hashlib.sha256(layer).hexdigest()]
    return config, tarfile.open(fileobj=io.BytesIO(layer))


def test_the_skeleton_has_every_place_that_the_view_is_bound_to_and_a_user_65534(tmp_path: Path) -> None:
    (tmp_path / "ld.so.cache").write_bytes(b"cache")
    image = skeleton_image(etc=tmp_path)
    config, layer = unpack(image)
    assert image.name == IMAGE
    assert {"usr", "opt", "tmp", "etc", "proc", "dev", "sys", "bin", "lib64", "etc/ld.so.cache"} <= set(layer.getnames())
    passwd = layer.extractfile("etc/passwd")
    assert passwd is not None and b":65534:65534:" in passwd.read()
    assert layer.getmember("tmp").mode == 0o1777
    assert layer.getmember("bin").linkname == "usr/bin"
    environment = config["config"]["Env"]  # type: ignore[index]
    assert "PYTHONDONTWRITEBYTECODE=1" in environment
    assert any(e.startswith("PATH=") and "/bin:" in e for e in environment)


def test_the_same_input_gives_the_same_image(tmp_path: Path) -> None:
    (tmp_path / "nsswitch.conf").write_text("hosts: files dns\n")
    first = skeleton_image(etc=tmp_path)
    (tmp_path / "nsswitch.conf").touch()
    assert skeleton_image(etc=tmp_path).digest == first.digest
    (tmp_path / "nsswitch.conf").write_text("hosts: dns\n")
    assert skeleton_image(etc=tmp_path).digest != first.digest


def test_pause_brings_its_own_program(tmp_path: Path) -> None:
    program = tmp_path / "p"
    program.write_bytes(b"\x7fELF")
    program.chmod(0o755)
    config, layer = unpack(pause_image(program))
    assert config["config"]["Entrypoint"] == ["/pause"]  # type: ignore[index]
    assert layer.getmember("pause").mode & 0o111


@pytest.mark.parametrize("binds", [[], [Bind("/a", "/a")]])
def test_a_spec_without_mounts_is_a_fault_of_ours(binds: list[Bind]) -> None:
    with pytest.raises(KeyError):
        base_spec({}, binds)
