"""Images without a registry: what of the host every container sees, and the two images that are skeletons around it.

A container's root is a few folders and links; containerd's base spec binds the host's /usr, interpreter, virtual environment, source folders and
models into it, read-only. So a pod runs the code of the checkout, and an edit needs no image build.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
import platform
import sys
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fleet_contract.cache_folder import cache_folder, make_dir
from fleet_contract.names import BUNDLED_MODELS_DIR, COMPILED_DIR, NATIVE_LIBRARY_DIR

IMAGE: Final = "localhost/radixfleet/local:dev"
PAUSE_IMAGE: Final = "localhost/radixfleet/pause:dev"
PACKAGES: Final = ("fleet_contract", "fleet_text", "fleet_operator", "fleet_router", "fleet_runtime", "fleet_cli", "fleet_local")
_FOLDERS: Final = ("usr", "opt", "etc", "tmp", "var", "var/tmp", "run", "proc", "sys", "dev", "home", "root")
_LINKS: Final = (("bin", "usr/bin"), ("lib", "usr/lib"), ("lib64", "usr/lib64"), ("sbin", "usr/sbin"), ("var/run", "../run"))
_FILES: Final = (
    ("etc/passwd", "root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/nonexistent:/usr/sbin/nologin\n"),
    ("etc/group", "root:x:0:\nnogroup:x:65534:\n"),
)
_FROM_ETC: Final = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ssl/openssl.cnf", "ssl/certs", "alternatives", "nsswitch.conf", "mime.types")


@dataclass(frozen=True, slots=True)
class Bind:
    """One folder of the host, and where containers see it."""

    source: str
    target: str


def host_view(folders: Iterable[str], own: Mapping[str, Path]) -> list[Bind]:
    """The binds of every container: each folder at its own path, none twice, none below another; then our own, by their path in a container.

    Pure but for link resolution.

    Exact folders, never a home above them: the folders on the way are then the container's own and open to a non-root user.
    """
    wanted = sorted({os.path.abspath(f) for f in folders})
    outer = [f for f in wanted if not any(f != o and Path(f).is_relative_to(o) for o in wanted)]
    return [Bind(os.path.realpath(f), f) for f in outer] + [Bind(os.path.realpath(folder), path) for path, folder in own.items()]


def this_host() -> list[Bind]:
    """The host view of the interpreter that runs us."""
    folders = [
        "/usr",
        sys.prefix,
        sys.base_prefix,
        os.path.realpath(sys.base_prefix),
        os.path.dirname(os.path.dirname(os.path.realpath(sys.executable))),
    ]
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            folders.append(str(Path(spec.origin).parent.parent))
    own = {
        BUNDLED_MODELS_DIR: Path(os.environ.get("RADIXFLEET_MODELS") or cache_folder() / "models"),
        NATIVE_LIBRARY_DIR: cache_folder() / "native",
        COMPILED_DIR: cache_folder() / "compiled",
    }
    for folder in own.values():
        make_dir(folder)
    return host_view(folders, own)


def closed_to_others(binds: Iterable[Bind]) -> list[str]:
    """The folders that a pod, which runs as nobody, could not read: those of a clone or environment made with a strict umask."""
    return [b.source for b in binds if os.stat(b.source).st_mode & 0o005 != 0o005]


def image_environment() -> dict[str, str]:
    """What a container finds in its environment: the console scripts of the virtual environment first."""
    return {
        "PATH": f"{sys.prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "LANG": "C.UTF-8",
        "HOME": "/tmp",
    }


def base_spec(spec: dict[str, object], binds: Sequence[Bind]) -> dict[str, object]:
    """containerd's default OCI spec with our binds. They do not reach the sandbox container, so `pause` brings its own binary. Pure."""
    mounts, process = spec["mounts"], spec["process"]
    assert isinstance(mounts, list) and isinstance(process, dict)
    # Its 1,024 files are no limit that clusters have: pods get that of the machine, by inheritance.
    limits = [limit for limit in process.get("rlimits", []) if limit["type"] != "RLIMIT_NOFILE"]
    extra = [{"destination": b.target, "type": "bind", "source": b.source, "options": ["rbind", "ro"]} for b in binds]
    return {**spec, "process": {**process, "rlimits": limits}, "mounts": [*mounts, *extra]}


@dataclass(frozen=True, slots=True)
class Image:
    """An OCI image archive in memory (OCI image-layout 1.0) and the digest that containerd will name it by."""

    name: str
    digest: str
    archive: bytes


def skeleton_image(*, etc: Path = Path("/etc")) -> Image:
    """The image of every radixfleet component on the local cluster."""
    files = [(etc / name, f"etc/{name}") for name in _FROM_ETC if (etc / name).exists()]
    return _image(IMAGE, ["/bin/sh"], image_environment(), files)


def pause_image(binary: Path) -> Image:
    """The image that holds a pod's namespaces."""
    return _image(PAUSE_IMAGE, ["/pause"], {}, [(binary, "pause")])


def _layer(files: Iterable[tuple[Path, str]]) -> bytes:
    out = io.BytesIO()

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.mtime = info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    with tarfile.open(fileobj=out, mode="w", dereference=False) as tar:
        for name in _FOLDERS:
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, 0o1777 if name.endswith("tmp") else 0o755
            tar.addfile(info)
        for name, target in _LINKS:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
        for name, text in _FILES:
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(text), 0o644
            tar.addfile(info, io.BytesIO(text.encode()))
        for source, name in files:
            tar.add(source, name, filter=plain)
    return out.getvalue()


def _image(name: str, entrypoint: list[str], environment: Mapping[str, str], files: Iterable[tuple[Path, str]]) -> Image:
    blobs: dict[str, bytes] = {}

    def blob(data: bytes, kind: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = data
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    def document(value: object) -> bytes:
        return json.dumps(value, sort_keys=True).encode()

    layer = blob(_layer(files), "layer.v1.tar")
    architecture = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    config = {
        "architecture": architecture,
        "os": "linux",
        "config": {"Entrypoint": entrypoint, "Env": [f"{k}={v}" for k, v in environment.items()], "WorkingDir": "/"},
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
    }
    kind = "application/vnd.oci.image.manifest.v1+json"
    manifest = blob(
        document({"schemaVersion": 2, "mediaType": kind, "config": blob(document(config), "config.v1+json"), "layers": [layer]}), "manifest.v1+json"
    )
    named = {**manifest, "annotations": {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name.rpartition(":")[2]}}
    blobs["oci-layout"] = document({"imageLayoutVersion": "1.0.0"})
    blobs["index.json"] = document({"schemaVersion": 2, "manifests": [named]})
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for path, data in blobs.items():
            info = tarfile.TarInfo(path)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return Image(name, str(manifest["digest"]), out.getvalue())
