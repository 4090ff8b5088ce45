"""The weights of a folder as arrays: headers that lie, tensors that do not fit, shards, types, rounding, memory that is given back."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import load_file, save_file

from fleet_runtime.errors import StartError
from fleet_runtime.models.families import checkpoint_names, spec_of
from fleet_runtime.models.files import read_config
from fleet_runtime.models.safetensors_file import tensors_of
from fleet_runtime.models.spec import ModelSpec
from fleet_runtime.models.weights import WeightFiles, count_parameters, open_weights, to_bf16, to_float32, weight_shapes

Copy = Callable[[Path], Path]
F32 = np.ndarray[Any, np.dtype[np.float32]]


def spec_in(folder: Path) -> ModelSpec:
    return spec_of(folder, read_config(folder))


def opened(folder: Path) -> WeightFiles:
    return open_weights(folder, spec_in(folder))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def fault_of(folder: Path) -> str:
    with pytest.raises(StartError) as e:
        opened(folder)
    assert e.value.reason == "ModelInvalid" and str(folder) in e.value.message and "\n" not in e.value.message
    return e.value.message


def test_every_weight_is_what_safetensors_reads(tiny_source: Path) -> None:
    expected, spec = load_file(tiny_source / "model.safetensors"), spec_in(tiny_source)
    with opened(tiny_source) as weights:
        for ours, theirs in checkpoint_names(spec).items():
            array = weights.get(ours)
            assert array.dtype == np.float32 and not array.flags.writeable and weights.dtype_of(ours) == "F32"
            assert array.shape == weights.shape_of(ours) == weight_shapes(spec)[ours]
            np.testing.assert_array_equal(array, expected[theirs].numpy())
        np.testing.assert_array_equal(weights.get("head"), weights.get("embedding"))  # tied
        assert "head" in weights and "0.q_bias" not in weights
        with pytest.raises(KeyError):
            weights.get("0.q_bias")


def test_sharded_and_single_files_give_the_same_weights_and_progress_to_the_end(tiny_source: Path, sharded_source: Path) -> None:
    percents: list[int] = []
    spec = spec_in(tiny_source)
    with opened(tiny_source) as one, open_weights(sharded_source, spec, lambda p, _t: percents.append(p)) as many:
        for name in checkpoint_names(spec):
            np.testing.assert_array_equal(one.get(name), many.get(name))
    assert percents == sorted(percents) and percents[-1] == 100
    expected = sum(t.numel() for t in load_file(tiny_source / "model.safetensors").values())
    assert count_parameters(tiny_source) == count_parameters(sharded_source) == expected


@pytest.mark.parametrize(("dtype", "tag"), [(torch.float32, "F32"), (torch.float16, "F16"), (torch.bfloat16, "BF16"), (torch.float64, "F64")])
def test_all_types_of_floats_are_read_and_converted_as_torch_does(tiny_source: Path, copy_of: Copy, dtype: torch.dtype, tag: str) -> None:
    folder = copy_of(tiny_source)
    change_tensors(folder, lambda ts: ts.update({n: t.to(dtype) for n, t in ts.items()}))
    expected = load_file(folder / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    with opened(folder) as weights:
        array = weights.get("1.up")
        assert weights.dtype_of("1.up") == tag and array.dtype.itemsize == dtype.itemsize
        np.testing.assert_array_equal(to_float32(array), expected.float().numpy())
        np.testing.assert_array_equal(to_bf16(array), expected.bfloat16().view(torch.uint16).numpy())


@given(values=hnp.arrays(np.float32, st.integers(0, 50), elements=st.floats(width=32)))
def test_any_number_is_rounded_to_bfloat16_as_torch_does_and_back_exactly(values: F32) -> None:
    got, expected = to_bf16(values), torch.from_numpy(values).bfloat16()
    nan = np.isnan(values)
    np.testing.assert_array_equal(got[~nan], expected.view(torch.uint16).numpy()[~nan])
    back = to_float32(got)
    np.testing.assert_array_equal(back, expected.float().numpy())
    assert np.isnan(back[nan]).all()
    np.testing.assert_array_equal(to_bf16(back)[~nan], got[~nan])


def test_conversions_of_more_than_one_piece_fill_a_given_array() -> None:
    values = np.linspace(-3, 3, (1 << 20) * 2 + 7, dtype=np.float32)[None]
    out = np.empty((1, values.size), np.uint16)
    assert to_bf16(values, out) is out
    np.testing.assert_array_equal(out[0], torch.from_numpy(values[0]).bfloat16().view(torch.uint16).numpy())
    wide = np.empty(values.shape, np.float32)
    assert to_float32(out, wide) is wide and float(np.abs(wide - values).max()) <= 3 / 256


def test_missing_unexpected_and_misshapen_tensors_are_named_together_with_shapes(tiny_source: Path, copy_of: Copy) -> None:
    folder = copy_of(tiny_source)

    def harm(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)
        tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(48, 95)
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(96, 48, dtype=torch.int8)

    change_tensors(folder, harm)
    message = fault_of(folder)
    for text in (
        "missing tensors: model.norm.weight [48];",
        "unexpected tensors: model.layers.0.self_attn.q_proj.bias [48];",
        "model.layers.1.mlp.down_proj.weight is [48, 95], config.json says [48, 96]",
        "model.layers.2.mlp.up_proj.weight is I8 (quantised weights are not supported), allowed: BF16, F16, F32, F64",
    ):
        assert text in message


def test_a_long_list_of_missing_tensors_is_cut(tiny_source: Path, copy_of: Copy) -> None:
    folder = copy_of(tiny_source)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 5}))
    assert " and 13 more" in fault_of(folder)


def test_unused_tensors_of_older_checkpoints_are_let_be(tiny_source: Path, copy_of: Copy) -> None:
    folder = copy_of(tiny_source)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()  # tied

    change_tensors(folder, add)
    opened(folder).close()


def test_a_model_saved_without_its_head_has_names_without_the_prefix(tiny_source: Path, copy_of: Copy) -> None:
    folder = copy_of(tiny_source)
    tensors = {n.removeprefix("model."): t for n, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    with opened(folder) as weights:
        np.testing.assert_array_equal(weights.get("2.down"), tensors["layers.2.mlp.down_proj.weight"].numpy())


def test_an_index_that_does_not_fit_its_files_is_refused(sharded_source: Path, copy_of: Copy) -> None:
    folder = copy_of(sharded_source)
    index = folder / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    name, files = "model.norm.weight", sorted(set(raw["weight_map"].values()))
    wrong = next(f for f in files if f != raw["weight_map"][name])
    index.write_text(json.dumps({"weight_map": {**raw["weight_map"], name: wrong}}))
    assert f"says that {name} is in {wrong}, it is not" in fault_of(folder)
    index.write_text(json.dumps(raw))
    double = load_file(folder / wrong) | {name: torch.ones(48)}
    save_file(double, folder / wrong)
    assert f"{name} is in " in fault_of(folder)


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HEADERS: dict[str, tuple[object, int, str]] = {
    "overlap": ({"a": GOOD, "b": {**GOOD, "data_offsets": [4, 12]}}, 12, "'b' begins at 4 and overlaps 'a'"),
    "gap": ({"a": GOOD, "b": {**GOOD, "data_offsets": [12, 20]}}, 20, "'b' begins at 12 and leaves a gap before it"),
    "gap at the begin": ({"a": {**GOOD, "data_offsets": [4, 12]}}, 12, "leaves a gap"),
    "more data than told": ({"a": GOOD}, 9, "has 9 bytes of data, its header tells of 8"),
    "less data than told": ({"a": GOOD}, 7, "'a' ends at 8: it was copied in part"),
    "size does not fit": ({"a": {**GOOD, "shape": [3]}}, 8, "'a' is F32 [3] and has 8 bytes, needs 12"),
    "unknown type": ({"a": {**GOOD, "dtype": "F31"}}, 8, "'a' has the type 'F31'; known: F64"),
    "no type": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, 8, "'a' has the type None"),
    "negative shape": ({"a": {**GOOD, "shape": [-1, -2]}}, 8, "no valid shape"),
    "shape of words": ({"a": {**GOOD, "shape": ["2"]}}, 8, "no valid shape"),
    "offsets turned round": ({"a": {**GOOD, "data_offsets": [8, 0]}}, 8, "no valid data_offsets"),
    "three offsets": ({"a": {**GOOD, "data_offsets": [0, 4, 8]}}, 8, "no valid data_offsets"),
    "true is no offset": ({"a": {**GOOD, "shape": [], "data_offsets": [False, True]}}, 1, "no valid data_offsets"),
    "entry is a list": ({"a": []}, 0, "no valid data_offsets"),
}


@pytest.mark.parametrize("name", list(HEADERS))
def test_a_header_that_lies_is_refused_with_the_tensor_and_the_numbers(tmp_path: Path, name: str) -> None:
    header, data, text = HEADERS[name]
    raw = json.dumps(header).encode()
    with pytest.raises(StartError) as e:
        tensors_of(tmp_path / "model.safetensors", raw, 8 + len(raw) + data)
    assert text in e.value.message and str(tmp_path) in e.value.message


@pytest.mark.parametrize("raw", [b"[" * 100_000, b'{"a":1,"a":2}', b"\xff\xfe", b'"a"'])
def test_a_header_that_is_no_object_is_refused(tmp_path: Path, raw: bytes) -> None:
    with pytest.raises(StartError, match="is not"):
        tensors_of(tmp_path / "model.safetensors", raw, 8 + len(raw))


def test_an_array_whose_data_is_not_aligned_is_whole(tiny_source: Path, copy_of: Copy) -> None:
    folder = copy_of(tiny_source)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    path.write_bytes(struct.pack("<Q", length + 1) + data[8 : 8 + length] + b" " + data[8 + length :])
    with opened(folder) as weights, opened(tiny_source) as good:
        array = weights.get("0.gate")
        assert array.flags.aligned
        np.testing.assert_array_equal(array, good.get("0.gate"))


def test_a_released_weight_leaves_memory_and_can_be_read_again(tmp_path: Path) -> None:
    raw = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 64 << 10, "hidden_size": 256, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 4, "tie_word_embeddings": True,
    }  # fmt: skip
    spec = spec_of(tmp_path, raw)
    shapes = weight_shapes(spec)
    tensors = {theirs: torch.ones(shapes[ours]) for ours, theirs in checkpoint_names(spec).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    del tensors
    me, size = psutil.Process(), 64 << 20
    with open_weights(tmp_path, spec) as weights:
        before = me.memory_info().rss
        assert weights.get("embedding").sum() == size // 4
        held = me.memory_info().rss
        weights.release("embedding")
        after = me.memory_info().rss
        assert held - before > size * 0.8 and after - before < size * 0.2
        array = weights.get("embedding")
    assert array[-1, -1] == 1.0  # what a caller holds stays mapped after the files are closed
