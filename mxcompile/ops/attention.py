"""The operator of attention whose keys and values are stored as MX data.

    attention    softmax(factor · q · kᵀ + mask) · v        FP32, k and v from codes and scales along head_dim

Functional, with a contiguous result, as the operators of `mx`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxcompile.formats import Format
from mxcompile.ops.cast import decoded
from mxcompile.ops.define import Spec, define


def _attention(
    q: Tensor,
    keys: Tensor,
    key_scales: Tensor,
    values: Tensor,
    value_scales: Tensor,
    mask: Tensor | None,
    factor: float,
    fmt: str,
) -> Tensor:
    repeats = q.shape[1] // keys.shape[1]
    k, v = (
        decoded(codes.view(Format.of(fmt).elem.dtype), scales, -1, fmt, torch.float32).repeat_interleave(
            repeats, 1
        )
        for codes, scales in ((keys, key_scales), (values, value_scales))
    )
    scores = q.to(torch.float32) @ k.transpose(-1, -2) * factor
    scores = scores if mask is None else scores + mask
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    weights = torch.where(nothing, 0, scores.softmax(-1))
    return (weights @ v).transpose(1, 2).contiguous().to(q.dtype)


def _spec_attention(q: Tensor, *_: Any) -> list[Spec]:
    batch, heads, queries, dim = q.shape
    return [((batch, queries, heads, dim), q.dtype)]


attention = define(
    "attention(Tensor q, Tensor keys, Tensor key_scales, Tensor values, Tensor value_scales, Tensor? mask,"
    " float factor, str fmt) -> Tensor",
    _attention,
    _spec_attention,
)
"""q [B, H, Q, D]; codes [B, KV, T, D], elements or their bytes; scales [B, KV, T, ⌈D/32⌉] → [B, Q, H, D].

The result has q's dtype. H is a multiple of KV: neighbouring heads of q share one of k and v. mask: added, of
a shape that [B, H, Q, T] takes. fmt: of keys and values. A query without a key that takes part gets 0.
"""
