"""Coupling the casts of two tensors that are computed from the same ones, and not coupling others."""

from __future__ import annotations

import pytest
import torch
from helpers.bits import assert_same_bits
from helpers.casts import casts_both, quantize_both
from helpers.graphs import calls, lowered, traced
from helpers.written import Written
from torch import Tensor, fx, nn
from torch.nn import functional as F

from mxcompile import ops
from mxcompile.lowering.graph.merge_sibling_casts import MergeSiblingCasts
from mxcompile.offline import codegen
from mxcompile.ops.view import Casts
from mxcompile.versions import newer

E4M3 = torch.float8_e4m3fn
SHAPE = (70, 96)


def _inputs(count: int) -> list[Tensor]:
    return [torch.randn(SHAPE).bfloat16() for _ in range(count)]


def _coupled(function, *inputs: Tensor, mode: str = "fake") -> tuple[fx.GraphModule, list[int]]:
    """The graph after the pass, and how many tensors each of its casts reads."""
    module, _ = lowered([MergeSiblingCasts], "sm_100", traced(function, *inputs, mode=mode))
    return module, [1 + (Casts.read(node).y is not None) for node in calls(module, ops.cast)]


def gradients(gradient, gate, up):
    """What a gated activation gives back, each cast where it is made, the first read before the second is."""
    first = quantize_both(gradient * F.silu(gate), E4M3, "rceil", "128x4")
    used = first[0].float() + 1
    second = quantize_both((gradient * up).view(SHAPE) * torch.sigmoid(gate), E4M3, "rceil", "128x4")
    return used, *first[1:], *second


def test_a_couple_is_merged_and_means_the_same():
    inputs = _inputs(3)
    module, casts = _coupled(gradients, *inputs)
    assert casts == [2]
    assert_same_bits(module(*inputs), gradients(*inputs))


def _casts(x: Tensor, y: Tensor, rounding: str = "rceil") -> tuple[Tensor, ...]:
    return *quantize_both(x, E4M3, "rceil"), *quantize_both(y, E4M3, rounding)


def made_of_the_first(a, b, c, d):
    first = quantize_both(a * b, E4M3, "rceil")
    later = first[0].bfloat16() @ torch.ones(96, 96, dtype=torch.bfloat16)
    return *first[1:], *quantize_both(a * b + later, E4M3, "rceil")


SEPARATE = {
    "four tensors": lambda a, b, c, d: _casts(a * b, a * b + c * d),
    "little in common": lambda a, b, c, d: _casts(a * b, a * c),
    "another rounding": lambda a, b, c, d: _casts(a * b, a - b, "floor"),
    "one is read elsewhere": lambda a, b, c, d: (lambda x: (*_casts(x, a - b), x.sum()))(a * b),
    "made of the first": made_of_the_first,
}


@pytest.mark.parametrize("name", SEPARATE)
def test_casts_without_the_same_inputs_stay_separate(name):
    _, casts = _coupled(SEPARATE[name], *_inputs(4))
    assert casts == [1, 1]


def test_rows_that_depend_on_data_are_not_compared():
    """As those of shared experts beside those of experts that tokens travel to."""

    def beside(gate, up, chosen):
        some = chosen.nonzero().flatten()
        return _casts(gate * up, gate[some] * up[some])

    _, casts = _coupled(beside, *_inputs(2), torch.ones(SHAPE[0], dtype=torch.bool), mode="symbolic")
    assert casts == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_100", "sm_120"])
@pytest.mark.parametrize("tokens", [1024, 1001])
def test_a_gated_layers_gradients_are_one_kernel(target, tokens):
    """It reads three tensors and writes four copies; nothing of theirs is stored in BF16."""
    hidden = 512
    gated = Written(
        lambda model, x: model.down(F.silu(model.gate(x)) * model.up(x)),
        **{name: nn.Linear(256, hidden, bias=False) for name in ("gate", "up")},
        down=nn.Linear(hidden, 256, bias=False),
    )
    x = torch.empty(tokens, 256, dtype=torch.bfloat16, requires_grad=True)
    result = codegen(gated.bfloat16(), x, target=target)
    (launch,) = [launch for launch in result.launches if casts_both(result, launch, 2)]
    elements = tokens * hidden
    assert launch.num_bytes <= elements * (3 * 2 + 4 * (1 + 1 / 32)) * 1.01
    assert launch.facts is not None
    # the tile is half as wide if rows are masked, and with newer versions of Triton, or its registers spill
    whole = 36 if newer("triton", "3.7") else 33
    assert 25 < launch.facts.per_element <= (38 if tokens % 32 else whole)
    assert not result.spilling
    assert result.kernel(launch).source.count("packed.sigmoid(") == 2
