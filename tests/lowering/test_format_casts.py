"""Casts to formats beside MXFP8 as Inductor compiles them, with the code for GPUs too: the bits are right."""

from __future__ import annotations

import pytest
import torch
from helpers.bits import assert_same_bits
from helpers.casts import encode
from test_casts import wild
from torch import Tensor
from torch._inductor.exc import InductorError
from torch._inductor.ops_handler import OpsHandler

from mxcompile import ops
from mxcompile.lowering.inductor import copies, decode
from mxcompile.lowering.targets import TARGETS


def check(word: str, dim: int, x: Tensor) -> None:
    """Codes and scales, the values that they stand for, and casts to values, under a scale at hand too."""
    seed = torch.tensor([4294967295])

    def function(x: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
        amax = ops.largest(x) if "two-level" in word else None
        qdata, scale = encode(x, dim, word, seed, 3, None, amax)
        (values,) = ops.cast(x, [f"{word} @{dim} bfloat16"], seed, 3, None, [amax])
        (others,) = ops.cast(x, [f"{word} @{dim} float32"], seed, 4, [scale], [amax])
        return qdata, scale, values, others, ops.decode(qdata, scale, dim, word, torch.float32, amax)

    torch._dynamo.reset()
    assert_same_bits(torch.compile(function, fullgraph=True)(x, seed), function(x, seed))


@pytest.mark.parametrize("word", ["e4m3 channel nearest", "e5m2 1x128 nearest", "e2m1 1x16 two-level"])
@pytest.mark.parametrize("has_operator", [True, False])
def test_fp32_quotients_of_compiled_casts_equal_reference(monkeypatch, has_operator: bool, word: str):
    """With the operator of PyTorch for them and without, as in older ones."""
    if not has_operator:
        monkeypatch.delattr(OpsHandler, "div_rn", raising=False)
    x = wild(64, 256, dtype=torch.float32)
    check(word, -1, torch.where(x.isfinite(), x, 1.0))


@pytest.mark.parametrize(
    ("word", "shape", "dim", "dtype"),
    [
        ("e5m2 tensor nearest stochastic", (33, 70), -1, torch.bfloat16),
        ("e4m3 1x32 rceil stochastic", (64, 128), -2, torch.float32),
        pytest.param("e4m3 1x32 rceil stochastic", (33, 70), -1, torch.float32, marks=pytest.mark.slow),
        pytest.param("e2m1 1x16 two-level stochastic", (33, 70), -1, torch.float32, marks=pytest.mark.slow),
        pytest.param("e2m1 1x32 floor stochastic", (33, 70), -2, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_compiled_stochastic_casts_equal_reference(
    word: str, shape: tuple[int, int], dim: int, dtype: torch.dtype
):
    check(word, dim, wild(*shape, dtype=dtype))


@pytest.mark.parametrize(
    ("word", "scale", "lacking"),
    [
        ("e5m2 tensor nearest stochastic @-1 codes", None, "pass seed"),
        ("e2m1 1x16 two-level @-1 elements", torch.ones(4, 2).to(torch.float8_e4m3fn), "reads the amax"),
    ],
)
def test_a_compiled_cast_without_an_input_is_an_error(word: str, scale: Tensor | None, lacking: str):
    """As in the reference: without its seed or amax a cast would have other elements."""
    torch._dynamo.reset()
    function = torch.compile(lambda x: ops.cast(x, [word], None, 0, [scale]), fullgraph=True)
    with pytest.raises(InductorError, match=lacking):
        function(torch.ones(4, 32))


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
        for module in (copies, decode):
            monkeypatch.setattr(module, "of_device", lambda device: TARGETS[target])
    x = torch.cat([every_amax(), wild(96, 32, dtype=torch.float32)])
    check(word, dim, x if dim == -1 else x.t().contiguous())
