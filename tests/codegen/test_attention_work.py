"""Attention on a GPU that is not here: the backend that PyTorch would take, its operations, its own rate."""

from __future__ import annotations

import pytest
import torch
from helpers.written import Written
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F

import mxcompile
from mxcompile.errors import OptionError
from mxcompile.lowering.targets import TARGETS
from mxcompile.offline.device import attention_backend
from mxcompile.offline.rates import Rates

HEADS, LENGTH, HEAD = 4, 256, 64
PRODUCT = 2 * HEADS * LENGTH**2 * HEAD


def _launches(
    target, *, causal=True, mask=None, head=HEAD, length=LENGTH, wrap=lambda model: model, **options
):
    def attend(model: Written, q: Tensor, mask: Tensor | None = None) -> Tensor:
        q = q * model.scale
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask, is_causal=causal)

    model = Written(attend, scale=nn.Parameter(torch.ones((), device="meta", dtype=torch.bfloat16)))
    q = torch.empty(1, HEADS, length, head, device="meta", dtype=torch.bfloat16, requires_grad=True)
    masks = () if mask is None else (torch.empty(mask, device="meta", dtype=torch.bfloat16),)
    return mxcompile.codegen(wrap(model), q, *masks, target=target, policy="bf16", **options).launches


def _attentions(target, **how):
    return [launch for launch in _launches(target, **how) if launch.kind == "attention"]


@pytest.mark.parametrize("causal", [True, False])
def test_attention_flops_halve_under_causal_mask(causal):
    """Two products forward, five backward, which computes the scores again; half of each under the mask."""
    forward, backward = _attentions("sm_80", causal=causal)
    half = 0.5 if causal else 1.0
    assert (forward.flops, backward.flops) == (2 * half * PRODUCT, 5 * half * PRODUCT)


def test_a_checkpointed_attention_runs_again_in_backward():
    forward, *others = _attentions("sm_100", wrap=checkpoint_wrapper)
    assert [(launch.phase, launch.work.product) for launch in others] == [
        ("backward", "cudnn"), ("backward", "cudnn_backward"),
    ]  # fmt: skip
    assert (others[0].kernel, others[0].flops) == (forward.kernel, forward.flops)


def test_the_rate_is_attentions_in_bf16():
    """A name with "scaled" in it is no FP8 product."""
    forward, backward = _attentions("sm_80")
    assert (forward.work.product, backward.work.product) == ("flash", "flash_backward")
    peak, rates = TARGETS["sm_80"].peak, Rates.for_target(TARGETS["sm_80"])
    for launch in (forward, backward):
        at_peak = launch.flops / (peak.dense_tflops["bf16"] * 1e6)
        assert launch.estimate.mma_us == pytest.approx(at_peak / rates[launch.work.product])


@pytest.mark.parametrize(
    ("target", "options", "operator"),
    [
        ("sm_100", {}, "cudnn"),
        pytest.param("sm_90", {}, "cudnn", marks=pytest.mark.slow),
        pytest.param("sm_120", {}, "flash", marks=pytest.mark.slow),
        ("gfx950", {}, "flash"),
        ("sm_100", {"attention": "flash"}, "flash"),
        pytest.param("sm_80", {"attention": "cudnn"}, "cudnn", marks=pytest.mark.slow),
        pytest.param("sm_100", {"head": 72 + 128}, "flash", marks=pytest.mark.slow),
    ],
)
def test_attention_takes_the_backend_of_pytorch(target, options, operator):
    forward, backward = _attentions(target, **options)
    name = f"torch.ops.aten._scaled_dot_product_{operator}_attention"
    assert forward.kernel.startswith(name)
    assert backward.kernel.startswith(f"{name}_backward")
    assert (forward.work.product, backward.work.product) == (operator, f"{operator}_backward")


def test_attention_with_mask_takes_the_efficient_backend():
    forward, _ = _attentions("sm_100", causal=False, mask=(LENGTH, LENGTH))
    assert forward.work.product == "efficient"


def test_kernel_that_prepares_a_mask_is_not_attention():
    """A kernel of Inductor has the name of the operator that it works for."""
    length = LENGTH - 2
    launches = _launches("sm_100", causal=False, length=length, mask=(length, length))
    named = [launch for launch in launches if "attention" in launch.kernel]
    assert [launch.generated for launch in named if launch.kind == "attention"] == [False, False]
    assert [launch.kind for launch in named if launch.generated] == ["rest"]


def test_unknown_attention_backend_raises():
    with pytest.raises(OptionError, match="unknown attention 'fa4'; allowed: auto, flash, cudnn"):
        attention_backend(TARGETS["sm_100"], "fa4")
    with pytest.raises(OptionError, match="allowed: auto, flash"):
        attention_backend(TARGETS["gfx950"], "cudnn")
