"""``torch._scaled_grouped_mm`` of groups of rows in MXFP8, as its checks and MSLK's kernel read arguments.

Group g's scales begin where those of the groups before it end, each padded to whole tiles of 128 rows; those
of the weights are a row for each matrix. Rows past the last group are left as memory has them, NaN here.
"""

from __future__ import annotations

import torch

from mxcompile.formats.scale_tiles import untile_scale


def _values(codes, scale):
    blocks = untile_scale(scale.view(torch.uint8), codes.shape[0], codes.shape[1] // 32)
    return codes.double() * torch.exp2(blocks.double() - 127).repeat_interleave(32, 1)


def documented(a, b, scale_a, scale_b, offs, *, out_dtype):
    """The products, in FP64, rounded once."""
    groups, k, n = b.shape
    across = -(-k // 128)
    assert k % 32 == 0
    assert a.stride() == (k, 1)
    assert b.stride() == (k * n, 1, k)
    assert scale_a.dtype is scale_b.dtype is torch.float8_e8m0fnu
    assert scale_a.ndim == 2
    assert scale_a.is_contiguous()
    assert scale_b.shape == (groups, -(-n // 128) * across * 512)
    assert offs.dtype is torch.int32
    out = torch.full((a.shape[0], n), torch.nan, dtype=out_dtype)
    begin = scale_begin = 0
    for group, end in enumerate(offs.tolist()):
        length = -(-(end - begin) // 128) * across * 512
        rows = _values(a[begin:end], scale_a.flatten()[scale_begin : scale_begin + length])
        out[begin:end] = (rows @ _values(b[group].t(), scale_b[group]).t()).to(out_dtype)
        begin, scale_begin = end, scale_begin + length
    return out


def install():
    """In place of PyTorch's."""
    torch._scaled_grouped_mm = documented
