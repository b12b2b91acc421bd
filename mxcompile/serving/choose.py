"""Which weights of a model a policy stores in MXFP8, and along which dimension: asked of the passes.

    model ─▶ trace without gradients (compiler/uses) ─▶ what its products cast (passes/weights)

So a weight is stored exactly where ``backend="mxfp8"`` would cast it in forward, in that format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mxcompile.compiler.uses import uses
from mxcompile.passes.weights import WeightUse, weight_uses
from mxcompile.policy import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """What is decided for one parameter.

    role: of its layers, the first of several. reason: why it is stored in MXFP8, or why not. block_dim: the
    dimension its blocks run along, negative. elem_dtype: None where it is not stored in MXFP8. rounding: of
    its scales.
    """

    role: str
    reason: str
    block_dim: int = -1
    elem_dtype: torch.dtype | None = None
    rounding: str = ""


def choose(
    model: nn.Module, policy: Policy, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Chosen]:
    """What `policy` decides for every weight of a linear layer or embedding of `model`, by parameter path.

    args, kwargs: what the model is called with; their values are not looked at. Raises `ModelError` where the
    model cannot be traced.
    """
    found = uses(model, policy, args, kwargs, weight_uses, training=False)
    return {path: _decided(each) for path, each in found.items()}


def _decided(found: Sequence[WeightUse]) -> Chosen:
    """One decision from all that is done with a weight: it is stored if that is one and the same cast."""
    first = found[0]
    for use in found:
        if use.elem_dtype is None:
            return Chosen(role=use.role, reason=use.reason)
    formats = {(use.block_dim, use.elem_dtype, use.rounding) for use in found}
    if len(formats) > 1:
        return Chosen(role=first.role, reason="its layers cast it in different ways")
    return Chosen(
        role=first.role,
        reason=first.reason,
        block_dim=first.block_dim - first.rank,
        elem_dtype=first.elem_dtype,
        rounding=first.rounding,
    )
