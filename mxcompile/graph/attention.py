"""The attention operators: softmax(q·kᵀ)·v in one node, and its gradients in another. One row each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class AttentionOp:
    """One operator, whose first arguments are q, k and v.

    before_q: how many arguments its backward has in front of q, k and v. tokens: the dimension of q, k and v
    that counts tokens. device, backend: where PyTorch's `scaled_dot_product_attention` becomes this operator,
    and PyTorch's word for it.
    """

    name: str
    library: Any = torch.ops.aten
    before_q: int = 1
    tokens: int = -2
    device: str = ""
    backend: str = ""

    @property
    def forward(self) -> Any:
        """The operator; None if this torch lacks it."""
        return getattr(self.library, self.name, None)

    @property
    def backward(self) -> Any:
        """The operator of its gradients; None if there is none."""
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
"""The rows by their operators."""

BACKENDS = {row.backend: row for row in _ROWS if row.backend}
"""The rows that PyTorch chooses among."""
