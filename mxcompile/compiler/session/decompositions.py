"""Decompositions for AOTAutograd: Inductor's, without those that would hide matmuls from the passes.

Inductor decomposes some matmuls of degenerate shape (one row, contraction length 1) before any pass runs.
Here they stay whole, and the pass `restore` decomposes those that stay in BF16. The fused inference operator
of ``nn.TransformerEncoderLayer`` is decomposed into its layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.nn import functional as F

aten = torch.ops.aten

_KEPT = frozenset({aten.mm, aten.addmm, aten.bmm, aten.mv, aten.addmv})


class Table(dict[Any, Callable[..., Any]]):
    """Decompositions by overload. Pickles as a call of `table`, because cache keys cannot hold functions."""

    def __reduce__(self) -> Any:
        return table, ()


def table() -> Table:
    """Returns the decompositions under the current Inductor configuration."""
    rules = select_decomp_table().items()
    changed = Table((op, rule) for op, rule in rules if getattr(op, "overloadpacket", op) not in _KEPT)
    changed[aten._transformer_encoder_layer_fwd.default] = _encoder_layer
    return changed


def _encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Any:
    """Decomposes ``aten._transformer_encoder_layer_fwd`` for dense input [B, T, C].

    mask: attention is blocked where it is not 0 (True, −inf). Its shape is [T, T], [B, T] or [B, H, T, T] for
    mask_type 0, 1 or 2.
    """
    if mask is not None and mask_type not in (0, 1, 2):
        return NotImplemented

    def attention(x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = F.linear(x, qkv_weight, qkv_bias)
        heads = qkv.view(batch, length, 3, num_heads, embed_dim // num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        allowed = None
        if mask is not None:
            blocked = mask.view(batch, 1, 1, length) if mask_type == 1 else mask
            allowed = blocked == 0  # bool or float, as the fused operator accepts both
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return F.linear(out.transpose(1, 2).reshape(batch, length, embed_dim), proj_weight, proj_bias)

    def feed_forward(x: Tensor) -> Tensor:
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        hidden = F.gelu(hidden) if use_gelu else F.relu(hidden)
        return F.linear(hidden, ffn_weight_2, ffn_bias_2)

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), weight, bias, eps)

    if norm_first:
        x = src + attention(norm(src, norm_weight_1, norm_bias_1))
        return x + feed_forward(norm(x, norm_weight_2, norm_bias_2))
    x = norm(src + attention(src), norm_weight_1, norm_bias_1)
    return norm(x + feed_forward(x), norm_weight_2, norm_bias_2)
