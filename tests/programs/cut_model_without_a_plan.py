"""Attention over jagged tensors cannot be planned, and a graph break cuts the model: strict mode raises."""

import pytest
import torch
from shared import REFUSED, compiled
from torch import nn


class Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o, self.last = (nn.Linear(64, 64) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (4, 16)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attention = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        return self.last(x + self.o(attention))


jagged = torch.nested.nested_tensor([torch.randn(n, 64) for n in (5, 9, 3)], layout=torch.jagged)
with pytest.raises(REFUSED, match="plan"):
    compiled(Ragged())(jagged).values().square().sum().backward()
