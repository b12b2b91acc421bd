"""The mx operators: what `torch.library.opcheck` demands, and their references."""

import pytest
import torch
from helpers.casts import (
    WITHOUT_SCHEMA,
    both,
    mx,
    operand_copies,
    operand_words,
    quantize,
    scaled_grouped_mm,
    scaled_mm,
)
from helpers.reference import round_trip
from torch.library import opcheck

from mxcompile import ops
from mxcompile.errors import FormatError

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16 = torch.bfloat16


@pytest.mark.parametrize("shape", [(40, 70), (64, 64), (0, 5), (3, 0), (2, 33, 65)])
@pytest.mark.parametrize("square", [False, True])
def test_mx_casts_and_decode_pass_opcheck(shape: tuple[int, ...], square: bool):
    x = torch.randn(shape, dtype=BF16)
    for dim in (-1, -2):
        opcheck(ops.cast, (x, mx(dim, E4M3, "rceil", square)))
        opcheck(ops.cast, (x, mx(dim, E5M2, "floor", square, dtype=BF16)))
        qdata, scale = quantize(x, dim, E4M3, "rceil", square)
        opcheck(ops.decode, (qdata, scale, dim, "e4m3 1x32 rceil", BF16), test_utils=WITHOUT_SCHEMA)
    opcheck(ops.cast, (x, both(E4M3, "even")))
    opcheck(ops.cast, (x, both(E4M3, "even"), None, 0, None, None, x + 1))
    opcheck(ops.cast, (x, operand_copies(E4M3, "even", BF16, "values", "codes")))
    tiles = torch.full((*x.shape[:-2], *(-(-size // 32) for size in x.shape[-2:])), 127, dtype=torch.uint8)
    opcheck(ops.decode, (x.to(E4M3), tiles, -1, "e4m3 32x32 rceil", BF16), test_utils=WITHOUT_SCHEMA)


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("bias", [None, 30])
def test_matmul_with_and_without_bias_passes_opcheck(batch: tuple[int, ...], bias: int | None):
    a, scale_a = quantize(torch.randn(*batch, 40, 70), -1, E4M3, "rceil")
    b, scale_b = quantize(torch.randn(*batch, 70, 30), -2, E5M2, "rceil")
    added = None if bias is None else torch.randn(bias)
    words = operand_words(E4M3, E5M2)
    opcheck(ops.matmul, (a, scale_a, b, scale_b, added, BF16, *words), test_utils=WITHOUT_SCHEMA)


GROUPED = {  # shapes of the operands, and along what their groups lie
    "rows": ((50, 64), (4, 64, 48), (10, 10, 30, 46)),
    "contracted": ((48, 50), (50, 64), (10, 10, 30, 50)),
    "columns": ((4, 48, 64), (64, 50), (10, 10, 30, 50)),
    "batch": ((4, 10, 64), (4, 64, 48), (10, 20, 30, 40)),
}


@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_grouped_products_pass_opcheck(kind: str, dtype: torch.dtype):
    left, right, ends = GROUPED[kind]
    a, b = torch.randn(left, dtype=dtype), torch.randn(right, dtype=dtype)
    opcheck(ops.grouped_mm, (a, b, torch.tensor(ends, dtype=torch.int32)))


@pytest.mark.parametrize("shape", [(40, 70), (300, 200), (128, 513), (1, 1), (0, 5)])
def test_tiled_scales_equal_row_major_scales_with_zero_padding(shape: tuple[int, int]):
    """The elements are the same, the scales say the same; the padding is zero."""
    x = torch.randn(shape).mul_(torch.exp2(torch.randint(-40, 40, shape)))
    for dim in (-1, -2, 0, 1):
        arguments = (x, dim, E4M3, "rceil", False, "128x4")
        qdata, tiled = quantize(*arguments)
        expected, scale = quantize(x, dim, E4M3, "rceil")
        assert torch.equal(qdata.view(torch.uint8), expected.view(torch.uint8))
        rows = scale if dim in (-1, 1) else scale.t()
        assert tiled.shape == (-(-rows.shape[0] // 128) * -(-rows.shape[1] // 4) * 512,)
        places = swizzled_places(*rows.shape)
        assert torch.equal(tiled[places], rows)
        assert int(tiled.long().sum()) == int(rows.long().sum())
        opcheck(ops.decode, (qdata, tiled, dim, "e4m3 1x32 rceil", BF16), test_utils=WITHOUT_SCHEMA)
        decoded = ops.decode(qdata, tiled, dim, "e4m3 1x32 rceil", torch.float32)
        assert torch.equal(decoded, ops.decode(qdata, scale, dim, "e4m3 1x32 rceil", torch.float32))
    opcheck(ops.cast, (x, both(E4M3, "even", "128x4"), None, 0, None, None, x + 1))


def swizzled_places(rows: int, blocks: int) -> torch.Tensor:
    """Where each byte of [rows, blocks] lies, by cuBLAS's formula."""
    row, block = torch.arange(rows)[:, None], torch.arange(blocks)[None, :]
    tile = row // 128 * -(-blocks // 4) + block // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4


def test_only_scales_of_a_matrix_are_tiled():
    with pytest.raises(FormatError, match="for a matrix only, found a tensor of 3 dimensions"):
        quantize(torch.randn(2, 3, 4), -1, E4M3, "rceil", False, "128x4")


@pytest.mark.parametrize("tiled", [(True, True), (True, False), (False, True), (False, False)])
def test_scaled_mm_in_every_scale_layout_equals_the_product_of_decoded_operands(tiled: tuple[bool, bool]):
    x, w, bias = torch.randn(150, 200), torch.randn(200, 40), torch.randn(40)
    layouts = ["128x4" if is_tiled else "row-major" for is_tiled in tiled]
    a = quantize(x, -1, E4M3, "rceil", False, layouts[0])
    b = quantize(w.t().contiguous(), -1, E5M2, "rceil", False, layouts[1])
    b_scale = b[1] if tiled[1] else b[1].t()  # a tiled scale has no transpose
    operands = (*a, b[0].t(), b_scale)
    arguments = (*operands, None, torch.float32)
    opcheck(ops.matmul, (*arguments, *operand_words(E4M3, E5M2)), test_utils=WITHOUT_SCHEMA)
    exact = round_trip(x, 1).double() @ round_trip(w, 0, "e5m2").double()
    torch.testing.assert_close(scaled_mm(*arguments).double(), exact, rtol=1e-5, atol=1e-4)
    output = scaled_mm(*operands, bias, torch.float32)
    torch.testing.assert_close(output.double(), exact + bias.double(), rtol=1e-5, atol=1e-4)
    assert torch.equal(scaled_mm(*operands, bias, BF16), output.to(BF16))


@pytest.mark.parametrize("bias", [None, 30])
@pytest.mark.parametrize("competes", [False, True])
def test_a_product_that_casts_passes_opcheck_and_means_the_same(competes: bool, bias: int | None):
    x, added = torch.randn(40, 70, dtype=BF16), None if bias is None else torch.randn(bias)
    a, b = quantize(x, -1, E5M2, "even"), quantize(torch.randn(70, 30), -2, E4M3, "rceil")
    words = "e5m2 1x32 even", "e4m3 1x32 rceil"
    arguments = (x, *b, added, BF16, *words, *(a if competes else ()))
    opcheck(ops.quantize_mm, arguments, test_utils=WITHOUT_SCHEMA)
    assert torch.equal(ops.quantize_mm(*arguments), scaled_mm(*a, *b, added, BF16))


def test_square_tiles_share_their_scale_in_both_layouts():
    x = torch.randn(70, 100)
    rowwise, row_scale = quantize(x, -1, E4M3, "rceil", True)
    columnwise, col_scale = quantize(x, -2, E4M3, "rceil", True)
    assert torch.equal(rowwise.view(torch.uint8), columnwise.view(torch.uint8))
    tiles = row_scale[::32]
    assert torch.equal(row_scale, tiles.repeat_interleave(32, 0)[:70])
    assert torch.equal(col_scale, tiles.repeat_interleave(32, 1)[:, :100])
    decoded = ops.decode(rowwise, row_scale, -1, "e4m3 1x32 rceil", torch.float32)
    assert torch.equal(decoded, round_trip(x, 1, square=True))


def test_grouped_product_passes_opcheck_and_is_one_product_per_group():
    x, w = torch.randn(40, 64), torch.randn(3, 64, 32)
    offs = torch.tensor([10, 10, 40], dtype=torch.int32)
    a, b = quantize(x, -1, E4M3, "rceil"), quantize(w, -2, E4M3, "rceil")
    arguments = (*a, *b, offs, BF16, *operand_words(E4M3, E4M3))
    opcheck(ops.grouped_matmul, arguments, test_utils=WITHOUT_SCHEMA)
    output = scaled_grouped_mm(*a, *b, offs, torch.float32)
    first_group = scaled_mm(a[0][:10], a[1][:10], b[0][0], b[1][0], None, torch.float32)
    three = scaled_mm(a[0][10:], a[1][10:], b[0][2], b[1][2], None, torch.float32)
    torch.testing.assert_close(output, torch.cat([first_group, three]))


@pytest.mark.parametrize("bias", [None, 30])
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("elem", [E4M3, E5M2], ids=str)
def test_weight_only_mm_passes_opcheck(elem: torch.dtype, rows: int, bias: int | None):
    qdata, scale = quantize(torch.randn(30, 70), -1, elem, "rceil")
    added = None if bias is None else torch.randn(bias)
    word = operand_words(elem, elem)[0]
    arguments = (torch.randn(rows, 70, dtype=BF16), qdata, scale, added, BF16, word)
    opcheck(ops.weight_only_mm, arguments, test_utils=WITHOUT_SCHEMA)


def test_weight_only_mm_equals_the_product_with_decoded_weight():
    x, w, bias = torch.randn(6, 100), torch.randn(72, 100), torch.randn(72)
    exact = x.double() @ round_trip(w, 1).double().t() + bias.double()
    stored = quantize(w, -1, E4M3, "rceil")
    output = ops.weight_only_mm(x, *stored, bias, torch.float32, "e4m3 1x32 rceil")
    torch.testing.assert_close(output.double(), exact, rtol=1e-5, atol=1e-4)
