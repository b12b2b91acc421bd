"""Casts to stochastic elements as Inductor compiles them: bit for bit the reference's."""

from __future__ import annotations

import pytest
import torch
from helpers.casts import encode
from test_casts import assert_same_bits, wild
from torch import Tensor
from torch._inductor.exc import InductorError

from mxcompile import ops


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
    def function(x: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
        amax = ops.largest(x) if "two-level" in word else None
        qdata, scale = encode(x, dim, word, seed, 3, None, amax)
        return qdata, scale, *ops.cast(x, [f"{word} @{dim} float32"], seed, 4, [scale], [amax])

    seed = torch.tensor([4294967295])
    x = wild(*shape, dtype=dtype)
    torch._dynamo.reset()
    assert_same_bits(torch.compile(function, fullgraph=True)(x, seed), function(x, seed))


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
