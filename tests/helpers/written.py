"""Modules that are a function of their parts, for tests whose model is one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Written(nn.Module):
    """`forward` is called with the module, which has `parts` as attributes, and its inputs."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.written = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.written(self, *inputs)


def random_parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, dtype=dtype))
