"""The random Hadamard transform: against its matrix in FP64, and products that it leaves as they are."""

from __future__ import annotations

import pytest
import torch
from helpers.reference import sqnr_db
from torch.library import opcheck

from mxcompile import ops
from mxcompile.formats.hadamard import SIGNS, WIDTH, transformed


def matrix(signs: int) -> torch.Tensor:
    """H · D / 4 by Sylvester's construction, FP64; rows are results."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < WIDTH:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    diagonal = torch.tensor([-1.0 if signs & 2**index else 1.0 for index in range(WIDTH)])
    return h * diagonal / 4


def test_the_signs_of_transformer_engine():
    """`get_wgrad_sign_vector` of its quantizer."""
    theirs = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
    assert [-1 if SIGNS >> index & 1 else 1 for index in range(WIDTH)] == theirs


@pytest.mark.parametrize("signs", [0, SIGNS, 0xFFFF, 12345])
@pytest.mark.parametrize("dim", [-1, -2, 0])
@pytest.mark.parametrize("shape", [(32, 48), (5, 33), (0, 4), (4, 0), (2, 40, 70)], ids=str)
def test_transform_equals_the_product_with_the_hadamard_matrix(shape: tuple[int, ...], dim: int, signs: int):
    x = torch.randint(-64, 65, shape).to(torch.float32)  # whose sums are exact
    padded = torch.nn.functional.pad(x.movedim(dim, -1), (0, -shape[dim] % WIDTH)).double()
    wanted = padded.unflatten(-1, (-(-shape[dim] // WIDTH), WIDTH)) @ matrix(signs).t()
    rows = transformed(x, dim, signs)
    assert rows.is_contiguous()
    assert torch.equal(rows.double(), wanted.flatten(-2).movedim(-1, dim))


def test_a_product_of_two_transformed_operands_is_theirs():
    x, dy = torch.randn(37, 45), torch.randn(37, 29)
    product = transformed(dy, 0, SIGNS).t() @ transformed(x, -2, SIGNS)
    assert sqnr_db(dy.t().double() @ x.double(), product) > 120


def test_hadamard_operator_passes_opcheck_for_odd_shapes():
    for shape in ((40, 70), (0, 5), (2, 33, 65)):
        opcheck(ops.hadamard, (torch.randn(shape), -2, SIGNS))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [-1, -2])
def test_compiled_it_has_the_same_bits(dim: int, dtype: torch.dtype):
    from mxcompile.lowering.graph import pipeline as pipeline

    torch._dynamo.reset()
    call = torch.compile(lambda x: ops.hadamard(x, dim, SIGNS), fullgraph=True, dynamic=True)
    for shape in ((33, 70), (64, 48)):
        x = torch.randn(shape).to(dtype)
        assert torch.equal(call(x), ops.hadamard(x, dim, SIGNS))
