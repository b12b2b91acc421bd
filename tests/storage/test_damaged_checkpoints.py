"""Checkpoints that are damaged, or of another model, are refused in one line."""

from __future__ import annotations

import json
import pickle

import pytest
from safetensors.torch import load_file, save_file
from small_models import assert_refused, change_json, llama, store_blocks
from test_checkpoints import small, stored
from torch import nn

import mxcompile
from mxcompile.checkpoint.files import INDEX, Checkpoint
from mxcompile.errors import CheckpointError


def saved(tmp_path, shard: int = 4000):
    mxcompile.save_quantized(stored(), tmp_path / "out", max_shard_bytes=shard)
    return tmp_path / "out"


def damage(folder, how: str) -> None:
    """Spoil a checkpoint of several shards."""
    first = sorted(folder.glob("*.safetensors"))[0]
    index = json.loads((folder / INDEX).read_text())
    match how:
        case "truncated":
            first.write_bytes(first.read_bytes()[:-1])
        case "longer":
            first.write_bytes(first.read_bytes() + b"0")
        case "empty":
            first.write_bytes(b"")
        case "header":
            first.write_bytes(b"\xff" * 8 + first.read_bytes()[8:])
        case "pickle":
            first.write_bytes(pickle.dumps({"weight": 1}))
        case "pickles":
            for file in folder.glob("*.safetensors"):
                file.rename(file.with_suffix(".bin"))
            (folder / INDEX).unlink()
        case "index":
            (folder / INDEX).write_text("{")
        case "missing":
            first.unlink()
        case "outside":
            outside = folder.parent / first.name
            first.rename(outside)
            index["weight_map"] = {
                k: v.replace(first.name, f"../{first.name}") for k, v in index["weight_map"].items()
            }
            (folder / INDEX).write_text(json.dumps(index))
        case "scale shape" | "scale dtype" | "no scale":
            whole = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
            scale = whole.pop("0.weight_scale")
            if how == "scale shape":
                whole["0.weight_scale"] = scale[:, :1].contiguous()
            if how == "scale dtype":
                whole["0.weight_scale"] = scale.float()
            for file in folder.iterdir():
                file.unlink()
            save_file(whole, folder / "model.safetensors")


DAMAGE = {
    "truncated": "not a whole safetensors file", "longer": "not a whole safetensors file",
    "empty": "not a whole safetensors file", "header": "not a whole safetensors file",
    "pickle": "not a whole safetensors file", "pickles": "holds pickles",
    "index": "not an index of safetensors",
    "missing": "is missing", "outside": "is not a file of this directory", "scale shape": "do not fit",
    "scale dtype": "which scales of .* do not fit", "no scale": "is missing: not an MXFP8 or FP8 weight",
}  # fmt: skip


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_refused_in_one_line(tmp_path, how):
    folder = saved(tmp_path)
    damage(folder, how)
    assert_refused(DAMAGE[how], folder, small("meta"))


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    folder = saved(tmp_path)
    for model, message in (
        (nn.Sequential(nn.Linear(64, 96)), "which the model lacks"),
        (nn.Sequential(*small(), nn.Linear(2, 2)), "which the model has"),
    ):
        assert_refused(message, folder, model)
    other = small()
    other[1] = nn.LayerNorm(95)
    assert_refused("has shape", folder, other)


def test_a_hugging_face_checkpoint_that_its_config_does_not_fit_is_refused_in_one_line(tmp_path):
    mxcompile.save_quantized(store_blocks(llama()), tmp_path / "out")
    config = (tmp_path / "out/config.json").read_text()
    for change in ({"intermediate_size": 64}, {"num_hidden_layers": 3}, {"hidden_size": "wide"}):
        (tmp_path / "out/config.json").write_text(config)
        change_json(tmp_path / "out/config.json", **change)
        assert_refused(str(tmp_path), tmp_path / "out")


def test_save_into_an_existing_directory_raises(tmp_path):
    folder = saved(tmp_path)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(CheckpointError, match="exists already"):
        mxcompile.save_quantized(stored(), folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert Checkpoint.open(folder).entries
