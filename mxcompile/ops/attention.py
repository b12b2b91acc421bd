"""Attention over keys and values that are stored as MX data, or as numbers.

    attention    softmax(factor · q · kᵀ + mask) · v        in FP32, after a decode of k and v

Blocks run along head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxcompile.formats import Format
from mxcompile.ops.cast import decoded
from mxcompile.ops.define import define


def _attention(
    q: Tensor,
    keys: Tensor,
    key_scales: Tensor | None,
    values: Tensor,
    value_scales: Tensor | None,
    mask: Tensor | None,
    factor: float,
    fmt: str,
) -> Tensor:
    repeats = q.shape[1] // keys.shape[1]
    sides = (keys, key_scales), (values, value_scales)
    k, v = (_numbers(*side, fmt).repeat_interleave(repeats, 1) for side in sides)
    scores = q.to(torch.float32) @ k.transpose(-1, -2) * factor
    scores = scores if mask is None else scores + mask
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    weights = torch.where(nothing, 0, scores.softmax(-1))
    return (weights @ v).transpose(1, 2).contiguous().to(q.dtype)


def _numbers(elements: Tensor, scales: Tensor | None, fmt: str) -> Tensor:
    if scales is None:
        return elements.to(torch.float32)
    return decoded(elements.view(Format.parse(fmt).elem.dtype), scales, -1, fmt, torch.float32)


attention = define(
    "attention(Tensor q, Tensor keys, Tensor? key_scales, Tensor values, Tensor? value_scales, Tensor? mask,"
    " float factor, str fmt) -> Tensor",
    _attention,
    lambda q, *_: [((q.shape[0], q.shape[2], q.shape[1], q.shape[3]), q.dtype)],
)
"""Attention of q [B, H, Q, D] over stored keys and values: [B, Q, H, D] in q's dtype.

keys, values: elements or their bytes, [B, KV, T, D]. key_scales, value_scales: [B, KV, T, ⌈D/32⌉]. H is a
multiple of KV, and neighbouring heads of q share a head of keys and values. mask: added to the scores,
broadcast to [B, H, Q, T]. fmt: format of keys and values; "" without scales, where they are numbers of
q's dtype. A query whose scores are all −∞ gets 0.
"""
