"""The ranks of `test_stored_ranks`: a model whose weights are stored, then sharded."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from helpers.stored_weights import FeedForward
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import mxcompile
from mxcompile import MXTensor

RANKS, WIDTH, TOKENS = 2, 64, 8
POLICIES = ("bf16", "inference")
NVFP4 = {"elem_dtype": torch.float4_e2m1fn_x2, "rounding": "two-level"}
FORMATS: dict[str, dict[str, Any]] = {
    "mxfp8": {}, "mxint8": {"elem_dtype": torch.int8}, "mxfp4": {"elem_dtype": torch.float4_e2m1fn_x2},
    "nvfp4": NVFP4,
}  # fmt: skip
HIDDEN = (128, 96)
"""Of the second, a rank's part of 48 features cuts a block of `down`."""


def stored(hidden: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = FeedForward(WIDTH, hidden).bfloat16().requires_grad_(False)
    mxcompile.quantize_weights_(model, args=(tokens(),), progress=False)
    return model


def tokens() -> Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()


def run(hidden: int, rank: int) -> dict[str, Any]:
    """Outputs of the sharded model, whose weights are those of the first rank."""
    columns = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    mesh = init_device_mesh("cpu", (RANKS,))
    model = parallelize_module(stored(hidden, seed=rank), mesh, columns)
    kinds = {name: type(parameter.to_local()).__name__ for name, parameter in model.named_parameters()}
    outputs = {"eager": model(tokens())}
    stored_gemms = {}
    for policy in POLICIES:
        torch._dynamo.reset()
        mxcompile.clear_reports()
        outputs[policy] = torch.compile(model, backend="mxfp8", options={"policy": policy})(tokens())
        (report,) = mxcompile.reports()
        formats = [operand for gemm in report.gemms for operand in gemm.formats]
        stored_gemms[policy] = sum(operand.rounding == "stored" for operand in formats)
    return {"kinds": kinds, "outputs": outputs, "stored": stored_gemms}


def outputs() -> dict[int, dict[str, Any]]:
    """What `run` gives on this rank, by the width inside."""
    with torch.no_grad():
        return {hidden: run(hidden, dist.get_rank()) for hidden in HIDDEN}


def weight(rank: int, precision: str) -> MXTensor:
    values = torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(rank))
    return mxcompile.quantize(values, **FORMATS[precision])


def received(precision: str) -> dict[str, Tensor]:
    """The values of a broadcast on this rank, by what the other ranks hold, and of a state dict's weights."""
    rank = dist.get_rank()
    buffers = {
        "stored": weight(rank, precision),
        "plain": weight(0, precision) if rank == 0 else torch.empty(48, WIDTH),
        "sent plain": weight(0, precision).dequantize(torch.float32)
        if rank == 0
        else weight(rank, precision),
    }
    for tensor in buffers.values():
        dist.broadcast(tensor, src=0)
    layer = nn.Linear(WIDTH, 48, bias=False)
    layer.weight = nn.Parameter(weight(rank, precision), requires_grad=False)
    full = {"weight": weight(0, precision)} if rank == 0 else {}
    how = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(layer, full, options=how)
    buffers["state dict"] = layer.weight.detach()
    return {
        name: x.dequantize(torch.float32) if isinstance(x, MXTensor) else x for name, x in buffers.items()
    }


def received_by_precision() -> dict[str, dict[str, Tensor]]:
    return {precision: received(precision) for precision in FORMATS}
