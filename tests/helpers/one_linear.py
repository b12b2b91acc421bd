"""One linear layer by hand, forward and gradients, each operand cast along its own contraction, in FP64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import mxcompile
from helpers.casts import rounded_tensors
from helpers.policies import every as policy
from mxcompile.formats import Choices, Operands
from mxcompile.formats.hadamard import transformed

MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def operands(use: dict[str, Any]) -> Operands:
    rule = mxcompile.Policy.from_dict(policy(use)).rules[0].use
    assert rule.fprop is not None
    return rule.fprop.formats(rule.over(Choices()))


def cast(x: Tensor, dim: int, operand: str, use: dict[str, Any], *, wgrad: bool = False) -> Tensor:
    fmt = operands(use).operand_format(operand, wgrad=wgrad)
    source = x if fmt.hadamard is None else transformed(x, dim, fmt.hadamard)
    return rounded_tensors(source, dim, fmt).double()


def expected(x: Tensor, w: Tensor, dy: Tensor, use: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Forward and both gradients of a linear layer, each operand cast along its own contraction."""
    y = cast(x, -1, "x", use) @ cast(w, -1, "w", use).t()
    dx = cast(dy, -1, "dy", use) @ cast(w, -2, "w", use)
    kept = cast(x, -1, "x", use).float() if use.get("saved") == "transcode" else x
    dw = cast(dy, -2, "dy", use, wgrad=True).t() @ cast(kept, -2, "x", use, wgrad=True)
    return y, dx, dw


def run(call: Any, weight: Tensor, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, weight.grad = x.clone().requires_grad_(), None
    y = call(x)
    y.backward(dy)
    return y.detach(), x.grad, weight.grad


class ByHand:
    """One linear layer in FP64 from FP8 operands; histories are lists, the newest first."""

    def __init__(self, weight: Tensor, length: int, margin: int = 0, decay: float | None = None) -> None:
        self.weight = weight.detach()
        self.length, self.margin, self.decay = length, margin, decay
        self.seen: dict[str, list[float]] = {"x": [], "w": [], "dy": []}

    def cast(self, name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
        now, before = float(value.abs().max()), self.seen[name]
        if self.decay is None:
            amax = max(before, default=0.0) * 2.0**self.margin
            self.seen[name] = [now, *before][: self.length]
        else:
            amax = now if not before else self.decay * before[0] + (1 - self.decay) * now
            self.seen[name] = [amax]
        scale = torch.tensor(amax, dtype=torch.float32) / MAX[dtype] if amax else torch.tensor(1.0)
        over = (value / scale).clamp(-MAX[dtype], MAX[dtype])
        return over.to(dtype).double() * scale.double()

    def step(self, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x8, w8 = (
            self.cast("x", x, torch.float8_e4m3fn),
            self.cast("w", self.weight, torch.float8_e4m3fn),
        )
        dy8 = self.cast("dy", dy, torch.float8_e5m2)
        return x8 @ w8.t(), dy8 @ w8, dy8.t() @ x8
