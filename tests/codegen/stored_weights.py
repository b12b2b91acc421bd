"""Models whose weights are stored in MXFP8, half the bytes of BF16, and stand for matrices when called."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mxcompile import ops


class StoredLinear(nn.Module):
    """`nn.Linear` of a weight quantized rowwise."""

    def __init__(self, linear: nn.Linear, elem: torch.dtype) -> None:
        super().__init__()
        weight = linear.weight.detach()
        if weight.is_meta:
            qdata = torch.empty_like(weight, dtype=elem)
            scale = weight.new_empty(weight.shape[0], -(-weight.shape[1] // 32), dtype=torch.uint8)
        else:
            qdata, scale = ops.quantize(weight, -1, elem, "rceil")
        self.register_buffer("qdata", qdata)
        self.register_buffer("scale", scale)
        self.bias = linear.bias
        self.dtype = weight.dtype

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, ops.dequantize(self.qdata, self.scale, -1, self.dtype), self.bias)


def with_stored_weights(model: nn.Module, elem: torch.dtype = torch.float8_e4m3fn) -> nn.Module:
    """`model`, its linear layers replaced in place."""
    for name, child in list(model.named_children()):
        if isinstance(child, nn.Linear):
            setattr(model, name, StoredLinear(child, elem))
        else:
            with_stored_weights(child, elem)
    return model
