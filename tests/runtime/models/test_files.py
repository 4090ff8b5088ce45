"""From a URI to a folder, its faults as sentences, and the revision that names its content."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fleet_contract.names import ENV_MODELS
from fleet_runtime.errors import StartError
from fleet_runtime.models.files import load_text_files, resolve_model
from fleet_testing.tiny_llama import make_llama
from fleet_text.prompt import PromptEncoder

Copy = Callable[[Path], Path]


def test_a_folder_a_file_uri_and_a_bundled_name_are_the_same_model(tiny_source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_path = resolve_model(str(tiny_source))
    assert by_path.folder == tiny_source and by_path.base_name == "small" and re.fullmatch("[0-9a-f]{16}", by_path.revision)
    assert resolve_model(f"file://{tiny_source}") == by_path
    assert resolve_model(f"{tiny_source}/") == by_path
    assert resolve_model("bundled://small", models_dir=tiny_source.parent) == by_path
    monkeypatch.setenv(ENV_MODELS, str(tiny_source.parent))
    assert resolve_model("bundled://small") == by_path
    monkeypatch.chdir(tiny_source.parent)
    assert resolve_model("small") == by_path


def test_bundled_models_are_looked_for_in_the_users_cache(tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_MODELS, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    place = tmp_path / ".cache/radixfleet/models"
    place.mkdir(parents=True)
    (place / "small").symlink_to(tiny_source)
    assert resolve_model("bundled://small").revision == resolve_model(str(tiny_source)).revision


def test_simulated_needs_no_folder_and_brings_its_own_text_files() -> None:
    model = resolve_model("simulated://")
    assert model.folder is None and model.base_name == "simulated" and re.fullmatch("[0-9a-f]{16}", model.revision)
    assert resolve_model("simulated://") == model
    other = resolve_model("simulated://big")
    assert other.base_name == "big" and other.revision != model.revision
    assert PromptEncoder(load_text_files(model)).vocab_size == 260


def test_text_files_of_a_folder_are_those_of_the_folder(tiny_source: Path) -> None:
    files = load_text_files(resolve_model(str(tiny_source)))
    assert files["tokenizer.json"] == (tiny_source / "tokenizer.json").read_bytes() and "config.json" in files


# What is done to a good folder -> reason, and what the sentence must say.
def _cut(path: Path, size: int) -> None:
    os.truncate(path, size)


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json missing"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json missing"),
    "neither": (lambda f: [(f / n).unlink() for n in ("config.json", "tokenizer.json")] and None, "config.json and tokenizer.json missing"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{") and None, "config.json is not JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]") and None, "config.json is not a JSON object"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors and no model.safetensors.index.json; it has no weights"),
    "torch weights": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin") and None, "it has pytorch_model.bin"),
    "empty weights": (lambda f: _cut(f / "model.safetensors", 0), "not a safetensors file"),
    "weights cut in the header": (lambda f: _cut(f / "model.safetensors", 100), "ends inside its header"),
    "weights cut in the data": (lambda f: _cut(f / "model.safetensors", (f / "model.safetensors").stat().st_size - 1), "copied in part"),
    "weights are a web page": (lambda f: (f / "model.safetensors").write_text("<!doctype html> <html>") and None, "not a safetensors file"),
    "header is no JSON": (lambda f: (f / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"{{{{") and None, "is not JSON"),
    "header without offsets": (
        lambda f: (f / "model.safetensors").write_bytes(struct.pack("<Q", 8) + b'{"a":{}}') and None,
        "entry of 'a' has no valid data_offsets",
    ),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_folder_that_is_not_whole_is_refused_with_its_path_and_what_is_wrong(tiny_source: Path, copy_of: Copy, fault: str) -> None:
    folder = copy_of(tiny_source)
    harm, text = FAULTS[fault]
    harm(folder)
    with pytest.raises(StartError) as e:
        resolve_model(str(folder))
    assert e.value.reason == "ModelInvalid" and text in e.value.message and str(folder) in e.value.message and "\n" not in e.value.message


def test_a_missing_shard_is_named(sharded_source: Path, copy_of: Copy) -> None:
    folder = copy_of(sharded_source)
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(StartError, match=f"names {shard.name}, not there"):
        resolve_model(str(folder))
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}')
    with pytest.raises(StartError, match="not there"):
        resolve_model(str(folder))
    (folder / "model.safetensors.index.json").write_text('{"weight_map": []}')
    with pytest.raises(StartError, match="weight_map is not a map"):
        resolve_model(str(folder))


@pytest.mark.parametrize(
    ("uri", "reason", "text"),
    [
        ("", "ModelInvalid", "model is empty"),
        ("hf://org/repo", "ModelInvalid", "hf:// is not supported; allowed: bundled://NAME, file:///PATH"),
        ("file://relative", "ModelInvalid", "three slashes"),
        ("/no/such/folder", "ModelNotFound", "/no/such/folder does not exist"),
        ("bundled://", "ModelNotFound", "there is smollm2-135m-instruct"),
        ("bundled://../etc", "ModelNotFound", "is no name of a bundled model"),
        ("bundled://gpt-9", "ModelNotFound", "there is smollm2-135m-instruct"),
        ("bundled://smollm2-135m-instruct", "ModelNotFound", "python -m fleet_runtime.models.bundled smollm2-135m-instruct"),
    ],
)
def test_a_uri_that_leads_nowhere_says_what_to_do(uri: str, reason: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(StartError) as e:
        resolve_model(uri, models_dir=tmp_path)
    assert (e.value.reason, text in e.value.message) == (reason, True), e.value.message


def test_a_file_is_not_a_model_folder(tiny_source: Path) -> None:
    with pytest.raises(StartError, match="is a file; give the folder"):
        resolve_model(str(tiny_source / "config.json"))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_folder_that_may_not_be_read_names_the_user(tiny_source: Path, copy_of: Copy) -> None:
    folder = copy_of(tiny_source)
    (folder / "model.safetensors").chmod(0o600)
    for parent in folder.parents:
        if str(parent).startswith("/tmp/"):
            parent.chmod(0o755)
    code = (
        "import os, sys\nfrom fleet_runtime.models.files import resolve_model, StartError\nos.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try: resolve_model(sys.argv[1])\nexcept StartError as e: print(e.reason, e.message)"
    )
    out = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True).stdout
    assert out.startswith("ModelInvalid") and "model.safetensors: Permission denied" in out and "user id 65534" in out


def test_the_revision_does_not_depend_on_place_name_or_readme(tiny_source: Path, copy_of: Copy) -> None:
    folder = copy_of(tiny_source)
    (folder / "README.md").write_text("words")
    (folder / ".stamp").write_text("words")
    assert resolve_model(str(folder)).revision == resolve_model(str(tiny_source)).revision


def test_the_revision_changes_with_config_tokenizer_template_and_sharding(tiny_source: Path, sharded_source: Path, copy_of: Copy) -> None:
    folder = copy_of(tiny_source)
    seen = {resolve_model(str(tiny_source)).revision, resolve_model(str(sharded_source)).revision}
    config = json.loads((folder / "config.json").read_text())
    for name, text in [
        ("config.json", json.dumps({**config, "rms_norm_eps": 1e-3})),
        ("tokenizer.json", (folder / "tokenizer.json").read_text() + " "),
        ("chat_template.jinja", "{{ messages }}"),
        ("generation_config.json", '{"eos_token_id": 7}'),
    ]:
        (folder / name).write_text(text)
        seen.add(resolve_model(str(folder)).revision)
    assert len(seen) == 6


def test_the_revision_of_a_fine_tune_of_the_same_shapes_differs_in_any_tensor(tiny_source: Path, copy_of: Copy) -> None:
    """One tensor after the other is changed everywhere; nothing else moves."""
    folder = copy_of(tiny_source)
    path = folder / "model.safetensors"
    original = path.read_bytes()
    length = struct.unpack("<Q", original[:8])[0]
    header = json.loads(original[8 : 8 + length])
    seen = {resolve_model(str(folder)).revision}
    tensors = [name for name in header if name != "__metadata__"]
    for name in tensors:
        start, end = (8 + length + o for o in header[name]["data_offsets"])
        path.write_bytes(original[:start] + bytes(b ^ 1 for b in original[start:end]) + original[end:])
        seen.add(resolve_model(str(folder)).revision)
    assert len(seen) == len(tensors) + 1


def test_the_revision_of_a_sharded_model_sees_every_shard(tmp_path: Path) -> None:
    for seed in (1, 2):
        make_llama(tmp_path / str(seed), seed=seed, max_shard_size="100KB")
    assert resolve_model(str(tmp_path / "1")).revision != resolve_model(str(tmp_path / "2")).revision
