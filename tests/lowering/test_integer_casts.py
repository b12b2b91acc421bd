"""Casts to integer elements as Inductor compiles them, also with the code for GPUs: the reference's bits."""

from __future__ import annotations

import pytest
import torch
from helpers.casts import encode
from test_casts import assert_same_bits, wild
from torch import Tensor

from mxcompile import ops
from mxcompile.lowering.inductor import copies as copies  # registers the lowerings
from mxcompile.lowering.inductor import general
from mxcompile.lowering.targets import TARGETS


def every_amax() -> Tensor:
    """Blocks [·, 32] with largest magnitudes around all powers of two and largest elements."""
    powers = torch.exp2(torch.arange(-149, 128).double())
    edges = torch.cat([powers * factor for factor in (1.0, 127 / 64, 127.5 / 64, 255 / 128)]).float()
    edges = edges[edges.isfinite()]
    amax = torch.cat([edges, edges.nextafter(torch.tensor(torch.inf)), edges.nextafter(torch.tensor(0.0))])
    shares = torch.linspace(-1, 1, 31)
    return torch.cat([amax[:, None], amax[:, None] * shares], 1)[: amax.numel() // 32 * 32]


@pytest.mark.parametrize(
    ("word", "dim", "target"),
    [
        ("int8 1x32 rceil", -1, None),
        pytest.param("int8 1x32 even", -2, "sm_80", marks=pytest.mark.slow),
        pytest.param("int8 1x32 ceil", -1, "sm_89", marks=pytest.mark.slow),
        pytest.param("int8 1x64 floor", -2, "sm_100", marks=pytest.mark.slow),
        pytest.param("int8 1x32 rceil stochastic", -1, None, marks=pytest.mark.slow),
    ],
)
def test_compiled_integer_casts_equal_reference(
    word: str, dim: int, target: str | None, monkeypatch: pytest.MonkeyPatch
):
    if target is not None:
        monkeypatch.setattr(general, "of_device", lambda device: TARGETS[target])

    def function(x: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
        qdata, scale = encode(x, dim, word, seed, 3)
        (values,) = ops.cast(x, [f"{word} @{dim} bfloat16"], seed, 3)
        return qdata, scale, values, ops.decode(qdata, scale, dim, word, torch.float32)

    x = torch.cat([every_amax(), wild(96, 32, dtype=torch.float32)])
    x, seed = x if dim == -1 else x.t().contiguous(), torch.tensor([7])
    torch._dynamo.reset()
    assert_same_bits(torch.compile(function, fullgraph=True)(x, seed), function(x, seed))
