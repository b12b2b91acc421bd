"""The attention operators, softmax(q·kᵀ)·v in one node, and the operators of their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class AttentionOp:
    """An attention operator, whose first arguments are q, k and v.

    before_q: number of arguments before q, k and v in its backward. tokens: dimension of tokens in q, k and
    v. device, backend: where `scaled_dot_product_attention` dispatches to it, and PyTorch's name of the
    backend.
    """

    name: str
    library: Any = torch.ops.aten
    before_q: int = 1
    tokens: int = -2
    device: str = ""
    backend: str = ""

    @property
    def forward(self) -> Any:
        """The forward operator; None if this torch version lacks it."""
        return getattr(self.library, self.name, None)

    @property
    def backward(self) -> Any:
        """The backward operator, or None."""
        return getattr(self.library, f"{self.name.removesuffix('_forward')}_backward", None)


_ROWS = (
    AttentionOp(name="scaled_dot_product_attention"),
    AttentionOp(name="_scaled_dot_product_attention_math"),
    AttentionOp(name="_scaled_dot_product_flash_attention", device="cuda", backend="flash"),
    AttentionOp(name="_scaled_dot_product_efficient_attention", device="cuda", backend="efficient"),
    AttentionOp(name="_scaled_dot_product_cudnn_attention", device="cuda", backend="cudnn"),
    AttentionOp(name="_scaled_dot_product_flash_attention_for_cpu", device="cpu", backend="cpu"),
    AttentionOp(name="_scaled_dot_product_fused_attention_overrideable"),
    AttentionOp(name="_flash_attention_forward", tokens=-3),
    AttentionOp(name="_efficient_attention_forward", tokens=-3),
    AttentionOp(name="flex_attention", library=torch.ops.higher_order, before_q=0),
)

ATTENTION_FORWARD = {row.forward: row for row in _ROWS if row.forward is not None}
ATTENTION_BACKWARD = {row.backward: row for row in _ROWS if row.backward is not None}
ATTENTIONS = ATTENTION_FORWARD | ATTENTION_BACKWARD
"""All rows by operator."""

BACKENDS = {row.backend: row for row in _ROWS if row.backend}
"""The rows among which PyTorch chooses, by backend."""
