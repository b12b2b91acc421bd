"""`quantize_weights_` in MXINT8: bytes, values and files."""

from __future__ import annotations

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from small_models import Model, quantized
from torch import Tensor

import mxcompile
from mxcompile.checkpoint.files import Checkpoint
from mxcompile.checkpoint.layouts import weights_in

POLICY = {"version": 1, "preset": "inference", "rules": [{"match": {"name": "blocks.*"}, "use": "mxint8"}]}


def by_hand(weight: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Integers and scale bytes of a matrix of whole blocks without zero blocks, in FP64."""
    blocks = weight.detach().double().numpy().reshape(len(weight), -1, 32)
    exponents = np.ceil(np.log2(np.abs(blocks).max(-1) / (127 / 64)))
    steps = np.rint(blocks / 2.0 ** exponents[..., None] * 64)
    return steps.reshape(weight.shape).astype(np.int8), (exponents + 127).astype(np.uint8)


def test_weights_in_mxint8_take_half_and_are_the_nearest_integers():
    model = Model()
    dense = {name: value.detach().clone() for name, value in model.named_parameters()}
    _, table = quantized(model, POLICY)
    assert {w.precision for w in table.weights if w.stored} == {"mxint8"}
    assert str(table).startswith("6 of 7 weights in MXINT8: ")
    for name in ("gate", "down"):
        weight = getattr(model.blocks[0], name).weight
        steps, scales = by_hand(dense[f"blocks.0.{name}.weight"])
        assert weight.elem_dtype is torch.int8
        assert np.array_equal(weight.qdata.numpy(), steps)
        assert np.array_equal(weight.scale_bytes.numpy(), scales)
        assert weight.stored_bytes == steps.size + scales.size


def test_a_checkpoint_keeps_integers_beside_other_tensors_of_int8(tmp_path):
    model, _ = quantized(policy=POLICY)
    mxcompile.save_quantized(model, tmp_path / "out")
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert tensors["blocks.0.up.weight"].dtype is torch.int8
    assert tensors["blocks.0.up.weight_scale"].dtype is torch.uint8
    other = {"mask": torch.ones(32, 32, dtype=torch.int8)}
    save_file({**tensors, **other}, tmp_path / "more.safetensors", metadata={"format": "pt"})
    layout, weights = weights_in(Checkpoint.open(tmp_path / "more.safetensors"))
    assert layout == "compressed-tensors"
    assert {w.name for w in weights if not w.stored} & {"mask", "embed.weight"} == {"mask", "embed.weight"}
