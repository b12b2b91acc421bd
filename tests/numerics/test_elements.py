"""Elements: every BF16 value under every scale, every code under every scale, special values."""

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers.reference import ELEMS, FP8, TORCH, element_codes, element_values
from helpers.spread import every_bf16

import mxcompile
from mxcompile import MXTensor


@pytest.mark.parametrize("elem", ELEMS)
def test_every_bf16_element_under_every_scale(elem: str):
    """Blocks led by largest·2^k fix the scale at 2^k; all BF16 values of at most that size follow."""
    largest, emax, _ = ELEMS[elem]
    values = every_bf16().float()
    values = values[values.isfinite()]
    seen = set()
    for byte in range(255):
        leader = torch.tensor(largest * 2.0 ** (byte - 127), dtype=torch.float64).float()
        if not leader.isfinite():
            break
        body = values[values.abs() <= leader]
        body = torch.nn.functional.pad(body, (0, -body.numel() % 31)).view(-1, 31)
        blocks = torch.cat([leader.expand(body.shape[0], 1), body], dim=1).bfloat16()
        quantized = mxcompile.quantize(blocks, elem_dtype=TORCH[elem])
        assert (quantized.scale.view(torch.uint8) == byte).all()
        scaled = blocks.double().numpy() * 2.0 ** (127 - byte)
        codes = quantized.qdata.view(torch.uint8).numpy()
        np.testing.assert_array_equal(codes, element_codes(scaled, elem))
        seen.add(byte)
    assert seen == set(range(max(seen) + 1))
    assert max(seen) == 254 - emax


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("elem", ELEMS)
def test_every_code_under_every_scale_dequantizes(elem: str, dtype: torch.dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    qdata = codes.view(TORCH[elem]).view(8, 32).repeat(1, 256)
    scale = codes.expand(8, 256).contiguous()
    values = MXTensor(qdata, scale.view(torch.float8_e8m0fnu)).dequantize(dtype)
    elements = element_values(codes.numpy(), elem).reshape(8, 1, 32)
    scales = 2.0 ** (np.arange(256.0) - 127)
    scales[255] = np.nan
    with np.errstate(over="ignore", invalid="ignore"):
        exact = (elements * scales[:, None]).reshape(8, -1)
        rounded = exact.astype(np.float32)
        expected = {
            torch.float32: rounded,
            torch.float64: rounded.astype(np.float64),
            torch.float16: rounded.astype(np.float16),
            torch.bfloat16: rounded.astype(ml_dtypes.bfloat16).astype(np.float32),
        }[dtype]
    values = values.float() if dtype is torch.bfloat16 else values
    np.testing.assert_array_equal(values.numpy(), expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("elem", ELEMS)
def test_nan_and_inf_take_their_block_and_no_other(elem: str, bad: float):
    x = torch.ones(3, 70)
    x[1, 40] = bad
    q = mxcompile.quantize(x, elem_dtype=TORCH[elem])
    expected = torch.zeros(3, 70, dtype=torch.bool)
    expected[1, 32:64] = True
    assert torch.equal(q.dequantize(torch.float32).isnan(), expected)
    assert (q.scale.view(torch.uint8) == 255).nonzero().tolist() == [[1, 1]]
    if elem in FP8:
        assert torch.equal(q.qdata.float().isnan(), expected)
    else:
        assert (q.qdata[0] == 64).all()
        assert q.qdata[1, 40] == 0 or not np.isnan(bad)


@pytest.mark.parametrize("rounding", ["rceil", "floor", "ceil", "even"])
def test_the_code_of_minus_two_is_read_and_never_written(rounding: str):
    """It is −128 in two's complement, which the standard lets an implementation leave out."""
    around = torch.tensor([127.0, 127.4, 127.5, 127.6, 127.99, 128.0, 128.5, 255.0]) / 64
    blocks = torch.stack([-around, around]).flatten()[:, None].expand(-1, 32).contiguous()
    quantized = mxcompile.quantize(blocks, elem_dtype=torch.int8, rounding=rounding)
    assert quantized.qdata.min() >= -127
    scale = torch.full((1, 1), 128, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    read = MXTensor(torch.full((1, 32), -128, dtype=torch.int8), scale).dequantize(torch.float32)
    assert (read == -4.0).all()


def test_zero_blocks_keep_signs():
    x = torch.tensor([0.0, -0.0]).repeat(32)
    q = mxcompile.quantize(x)
    assert (q.scale.view(torch.uint8) == 0).all()
    assert torch.equal(torch.signbit(q.dequantize(torch.float32)), torch.signbit(x))


def test_torchao_agrees_where_it_is_right():
    """torchao 0.18 is an independent oracle for finite BF16, except in blocks whose byte is 0."""
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    config = pytest.importorskip("torchao.prototype.mx_formats.config")
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-60, 60, (512, 8, 1), generator=generator)
    x = torch.randn(512, 8, 32, generator=generator).ldexp(exponents).view(512, 256).bfloat16()
    for rounding in ("rceil", "floor", "ceil", "even"):
        mode = config.ScaleCalculationMode(rounding)
        for elem in FP8:
            scale, qdata = mx.to_mx(x, TORCH[elem], 32, mode)
            quantized = mxcompile.quantize(x, elem_dtype=TORCH[elem], rounding=rounding)
            assert torch.equal(quantized.scale.view(torch.uint8), scale.view(torch.uint8).view(512, 8))
            assert torch.equal(quantized.qdata.view(torch.uint8), qdata.view(torch.uint8))
