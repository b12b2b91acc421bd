"""Checkpoints of a layer, written by hand as other projects write them."""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import mxcompile
from mxcompile import MXTensor

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
N, K = 256, 384
FP8 = {"m.weight": torch.zeros(N, K).to(E4M3), "m.weight_scale_inv": torch.ones(2, 3)}


def write(folder: Any, tensors: dict[str, Tensor], config: dict[str, Any] | None) -> Any:
    folder.mkdir()
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


def layer(n: int = N, k: int = K) -> nn.Module:
    return nn.ModuleDict({"m": nn.Linear(k, n, bias=False, dtype=BF16, device="meta")})


def loaded(folder: Any, n: int = N, k: int = K) -> MXTensor:
    weight: Any = mxcompile.load_quantized(folder, layer(n, k))["m"].weight
    assert isinstance(weight, MXTensor)
    return weight


def e4m3(*shape: int) -> Tensor:
    return (torch.randn(shape) * 100).to(E4M3)
