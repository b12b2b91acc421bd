"""The table of precisions: a row of one's own, from the policy's word to the compiled gradient."""

import pytest
import torch
from helpers.policies import every
from helpers.reference import sqnr_db
from torch import nn

import mxcompile
from mxcompile import Policy
from mxcompile.compiler.calls import delayed_scales
from mxcompile.errors import FormatError, PolicyError
from mxcompile.formats import PRECISIONS, ElemType, Format, Precision, Tile, Tiles, precisions

SIGNS = "expected 16 signs as a number from 0 to 65535, or false"
TOY = ElemType(name="e2m2", dtype=torch.uint8, max=7.0, emax=2, mantissa_bits=2, min_exponent=0, bits=5)


@pytest.fixture
def toy():
    row = Precision(name="toy5", label="TOY5", elems=(TOY,), tiles={"8": Tiles(x=Tile(1, 8), w=Tile(8, 8))})
    precisions.add(row)
    yield row
    del PRECISIONS["toy5"]


def cast_by_hand(x: torch.Tensor, rows: int) -> torch.Tensor:
    """E2M2 with a power of two for `rows` × 8 elements, in FP64, from the list of its values."""
    grid = sorted({s * m * 2.0**e for s in (1, -1) for m in (1, 1.25, 1.5, 1.75) for e in (0, 1, 2)})
    grid = torch.tensor(sorted({*grid, *(s * q / 4 for s in (1, -1) for q in range(4))}), dtype=torch.float64)
    out = torch.zeros_like(x, dtype=torch.float64)
    for top in range(0, x.shape[0], rows):
        for column in range(0, x.shape[1], 8):
            tile = x[top : top + rows, column : column + 8].double()
            exponent = torch.frexp(tile.abs().max() / 7.0).exponent
            scale = 2.0 ** (int(exponent) - (tile.abs().max() / 7.0 == 2.0 ** (int(exponent) - 1)).int())
            nearest = (tile[..., None] / scale - grid).abs().argmin(-1)
            out[top : top + rows, column : column + 8] = grid[nearest] * scale
    return out


def test_a_row_of_ones_own_trains(toy: Precision):
    torch.manual_seed(0)
    linear, x = nn.Linear(40, 24, bias=False), torch.randn(16, 40, requires_grad=True)
    policy = Policy.from_dict(every("toy5"))
    mxcompile.clear_reports()
    y = torch.compile(linear, backend="mxfp8", options={"policy": policy})(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    w = linear.weight.detach()
    assert sqnr_db(cast_by_hand(x.detach(), 1) @ cast_by_hand(w, 8).t(), y) > 100
    assert sqnr_db(cast_by_hand(dy, 1) @ cast_by_hand(w, 8), x.grad) > 100
    along_tokens = cast_by_hand(dy.t(), 1), cast_by_hand(x.detach().t(), 1)
    assert sqnr_db(along_tokens[0] @ along_tokens[1].t(), linear.weight.grad) > 100
    report = mxcompile.reports()[-1]
    assert {gemm.precision for gemm in report.gemms} == {"toy5"}
    formats = {str(fmt) for gemm in report.gemms for fmt in gemm.formats}
    assert formats == {"x:e2m2 1x8 rceil", "w:e2m2 8x8 rceil", "dy:e2m2 1x8 rceil"}
    assert "TOY5" in str(report)


def test_a_word_is_taken_once(toy: Precision):
    with pytest.raises(FormatError, match="a precision 'toy5' is registered already"):
        precisions.add(toy)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ({"precision": "fp8_rowwise"}, "is a preset.*{precision: fp8, scaling: channel}"),
        ({"wgrad": "fp8_tensor"}, "is a preset.*{precision: fp8, grad_dtype: e5m2}"),
        ({"precision": "fp8", "rounding": "floor"}, "'rounding' does not belong to fp8"),
        ({"precision": "mxfp8", "scaling": "tensor"}, "'scaling' does not belong to mxfp8"),
        ({"precision": "mxfp8", "scale": "pow2"}, "'scale' does not belong to mxfp8"),
        ({"precision": "fp8", "scale": "e8m0"}, "unknown scale 'e8m0'"),
        ({"precision": "mxfp4", "elem_dtype": "e5m2"}, "'elem_dtype' does not belong to mxfp4"),
        ({"precision": "mxint8", "grad_dtype": "e5m2"}, "e5m2 does not belong to mxint8: it has int8, e4m3"),
        ({"precision": "mxint8", "elem_dtype": "e4m3"}, "'elem_dtype' does not belong to mxint8"),
        ({"precision": "mxfp8", "grad_dtype": "int8"}, "int8 does not belong to mxfp8: it has e4m3, e5m2"),
        ({"precision": "mxfp8", "elem_dtype": "int8"}, "unknown element type 'int8'"),
        ({"precision": "mxfp8", "block": 48}, "unknown block 48"),
        (
            {"precision": "mxfp8", "weight_block": "16x16"},
            "16x16 does not belong to mxfp8: it has 1x32, 32x32",
        ),
        (
            {"precision": "nvfp4", "weight_block": "32x32"},
            "32x32 does not belong to nvfp4: it has 1x16, 16x16",
        ),
        ({"precision": "mxfp8", "hadamard": 5}, "'hadamard' does not belong to mxfp8"),
        ({"precision": "nvfp4", "hadamard": 65536}, SIGNS),
        ({"precision": "nvfp4", "hadamard": True}, SIGNS),
        ({"precision": "nvfp4", "rounding": "floor"}, "'rounding' does not belong to nvfp4"),
        ({"precision": "mxfp4", "four_over_six": {"w": 256}}, "'four_over_six' does not belong to mxfp4"),
        ({"precision": "fp8", "row_scaled": "x"}, "'row_scaled' does not belong to fp8"),
        ({"precision": "mxfp8", "block": 64, "weight_block": "32x32"}, "'weight_block' needs block: 32"),
        ({"precision": "fp8", "scaling": "late"}, "unknown scaling 'late'"),
        ({"precision": "fp8", "history": 16}, "'history' needs scaling: delayed"),
        ({"precision": "fp8", "scaling": "delayed", "history": 0}, "expected a positive integer"),
        ({"precision": "fp8", "scaling": "delayed", "margin": 0.5}, "expected a whole number from -16 to 16"),
        (
            {"precision": "fp8", "scaling": "delayed", "amax": {"ema": 0.9}},
            "whose scales follow from a history",
        ),
        ({"precision": "fp8", "scaling": "channel", "amax": {"ema": 0.9}}, "'ema' needs one scale a tensor"),
        ({"precision": "mxfp8", "amax": {"ema": 0.9}}, "'ema' needs one scale a tensor"),
        ({"precision": "mxfp8", "amax": {"percentile": 0}}, "a number between 0 and 100"),
        ({"precision": "mxfp8", "amax": {"median": 1}}, "unknown key 'median'"),
        ({"precision": "mxfp8", "amax": 99}, "expected {percentile: 99.99}"),
    ],
)
def test_choices_a_precision_does_not_have_are_errors(use: dict[str, object], message: str):
    with pytest.raises(PolicyError, match=message):
        Policy.from_dict({"version": 1, "rules": [{"match": {"role": "qkv"}, "use": use}]})


def test_choices_of_a_preset_for_another_precision_do_not_hinder_a_rule():
    use = {"precision": "mxfp8", "amax": {"percentile": 99.0}}
    rules = [{"match": {"role": "qkv"}, "use": use}]
    policy = Policy.from_dict({"version": 1, "preset": "fp8_delayed", "rules": rules})
    formats = policy.rules[0].use.over(policy.base.formats)
    assert str(PRECISIONS["mxfp8"].formats(formats).x.amax) == "percentile:99"


def test_one_rule_chooses_tiles_for_each_precision_it_names():
    use = {"fprop": "mxfp8", "dgrad": "fp8", "block": 64, "scaling": "delayed"}
    policy = Policy.from_dict({"version": 1, "rules": [{"match": {"role": "qkv"}, "use": use}]})
    formats = {name: PRECISIONS[name].formats(policy.rules[0].use).x for name in ("mxfp8", "fp8")}
    assert formats["mxfp8"].tile == Tile(1, 64)
    assert formats["fp8"].amax.kind == "delayed"
    assert delayed_scales.needed(policy)


def test_words_of_formats_are_read_back():
    for row in PRECISIONS.values():
        for tiles in row.tiles:
            operands = row.formats(precisions.Choices(block=tiles, scaling=tiles))
            for fmt in (operands.x, operands.w, operands.dy):
                assert Format.parse(str(fmt)) == fmt
