"""Ranks that share a sequence: what the plan of their own code is, and that PyTorch's own does not trace."""

from __future__ import annotations

from collections import Counter
from typing import Any

import meshed
import pytest
from helpers.made import Made
from meshed import HEAD, TOKENS, WIDTH, decisions
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional as F

import mxcompile
from mxcompile.errors import ModelError

NAMED = {"policy": "nvidia", "target": "cpu"}
RANKS = 4


class Attention(meshed.Attention):
    """One of a rank's tokens to those of all ranks of `group`."""

    group: Any = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for p in (self.wq, self.wk, self.wv))
        k, v = (all_gather_tensor_autograd(tensor.contiguous(), 2, self.group) for tensor in (k, v))
        return self.wo(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


def gathering(mesh: DeviceMesh) -> meshed.Prepared:
    example = meshed.plain()
    for block in example[0].layers:
        block.attention.__class__, block.attention.group = Attention, mesh["cp"].get_group()
    return example


def test_names_and_decisions_are_those_of_the_whole():
    model, args, _ = meshed.plain()
    whole = mxcompile.explain(model, *args, **NAMED)
    rank = mxcompile.explain_rank(gathering, mesh=f"cp={RANKS}", **NAMED)
    assert not rank.warnings
    assert decisions(rank.report) == decisions(whole)
    scores = (gemm for gemm in rank.report.gemms if (gemm.role, gemm.gemm) == ("attn_scores", "fprop"))
    assert {(gemm.m, gemm.n) for gemm in scores} == {(TOKENS, RANKS * TOKENS)}


def test_keys_and_values_are_exchanged():
    rank = mxcompile.explain_rank(gathering, mesh=f"cp={RANKS}", **NAMED)
    part = 4 * TOKENS * WIDTH
    assert Counter((c.kind, c.phase, c.axis, c.num_bytes) for c in rank.collectives) == {
        ("all-gather", "forward", "cp", part): 2 * 2,
        ("reduce-scatter", "backward", "cp", RANKS * part): 2 * 2,
    }


class Sharing(Made, model=meshed.Llama):
    """A model that shares its tokens by PyTorch's own context."""

    def forward(self, ids: Tensor) -> Tensor:
        with context_parallel(self.mesh, buffers=[ids], buffer_seq_dims=[1]):
            return self.model(ids)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_context_parallel_of_pytorch_raises_error_naming_gpus():
    def factory(mesh: DeviceMesh) -> meshed.Prepared:
        return Sharing(mesh=mesh["cp"]), meshed.plain()[1], {}

    with pytest.raises(ModelError, match="context_parallel splits attentions on GPUs only"):
        mxcompile.explain_rank(factory, mesh="cp=4", **NAMED)
