"""`quantize` and `MXTensor` as users meet them: shapes, dtypes, dims, errors."""

import numpy as np
import pytest
import torch
from helpers.reference import FP8, TORCH, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

import mxcompile
from mxcompile.errors import FormatError, MXCompileError

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_shape_dim_dtype_format(data: st.DataObject):
    shape = data.draw(st.lists(st.integers(0, 70), min_size=1, max_size=3))
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    dtype = data.draw(st.sampled_from(DTYPES))
    elem = data.draw(st.sampled_from(list(FP8)))
    rounding = data.draw(st.sampled_from(["rceil", "floor", "ceil", "even"]))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    spread = data.draw(st.sampled_from([0, 4, 14]))
    raw = rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, spread + 1, shape)
    x = torch.from_numpy(raw).to(dtype)
    if data.draw(st.booleans()) and x.ndim > 1:
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    quantized = mxcompile.quantize(x, block_dim=dim, elem_dtype=TORCH[elem], rounding=rounding)

    assert quantized.qdata.shape == x.shape
    assert quantized.qdata.is_contiguous()
    rows = x.float().movedim(dim, -1)
    if rows.numel() == 0:
        return
    values, scales = quantize(rows.reshape(-1, rows.shape[-1]).numpy(), elem, rounding)
    moved = quantized.qdata.float().movedim(dim, -1).reshape(values.shape)
    np.testing.assert_array_equal(moved.numpy(), values.astype(np.float32))
    bytes_ = quantized.scale.view(torch.uint8).movedim(dim, -1).reshape(scales.shape)
    np.testing.assert_array_equal(bytes_.numpy(), scales)


def test_defaults_and_round_trip():
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(0))
    q = mxcompile.quantize(x)
    assert q.qdata.dtype is torch.float8_e4m3fn
    assert q.scale.dtype is torch.float8_e8m0fnu
    assert q.scale.shape == (4, 3)
    assert q.dequantize().dtype is torch.bfloat16
    second = mxcompile.quantize(q.dequantize(torch.float32))
    assert torch.equal(second.dequantize(torch.float32), q.dequantize(torch.float32))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mxcompile.quantize([1.0]), "cannot quantize a list"),
        (lambda: mxcompile.quantize(torch.arange(64)), "torch.int64"),
        (lambda: mxcompile.quantize(torch.tensor(1.0)), "scalar"),
        (lambda: mxcompile.quantize(torch.eye(32).to_sparse()), "cannot quantize a sparse_coo tensor"),
        (lambda: mxcompile.quantize(torch.ones(32), block_dim=1), "block_dim 1"),
        (lambda: mxcompile.quantize(torch.ones(32), rounding="ceill"), "did you mean 'ceil'"),
        (lambda: mxcompile.quantize(torch.ones(32), elem_dtype=torch.float8_e5m2fnuz), "e5m2"),
    ],
)
def test_quantize_refuses_wrong_arguments_with_format_error(call, message: str):
    with pytest.raises(FormatError, match=message) as caught:
        call()
    assert isinstance(caught.value, MXCompileError)
    assert isinstance(caught.value, ValueError)


def test_mxtensor_checks_its_parts():
    q = mxcompile.quantize(torch.ones(2, 64))
    with pytest.raises(FormatError, match=r"needs \(2, 2\)"):
        mxcompile.MXTensor(q.qdata, q.scale[:, :1])
    with pytest.raises(FormatError, match="float8_e8m0fnu"):
        mxcompile.MXTensor(q.qdata, q.scale.view(torch.uint8))
    with pytest.raises(FormatError, match="not a floating-point"):
        q.dequantize(torch.int32)


def test_flushed_denormals_become_zero_and_nothing_else_changes():
    """As docs/numerics.md has it."""
    tiny, ordinary = torch.full((1, 32), 1e-40), torch.randn(8, 64)
    expected = mxcompile.quantize(ordinary)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush denormals")
    try:
        assert not mxcompile.quantize(tiny).dequantize(torch.float32).any()
        quantized = mxcompile.quantize(ordinary)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(quantized.qdata.view(torch.uint8), expected.qdata.view(torch.uint8))
    assert torch.equal(quantized.dequantize(torch.float32), expected.dequantize(torch.float32))
