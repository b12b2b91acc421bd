"""Numbers whose magnitudes change from tile to tile: equal scales hide no wrong one. And all of BF16."""

from __future__ import annotations

import torch
from torch import Tensor


def spread(
    *shape: int, binades: int = 8, tile: tuple[int, int] = (1, 1), generator: torch.Generator | None = None
) -> Tensor:
    """Normal values [.., m, n], FP32, times 2^p for each tile of a matrix: −binades ≤ p < binades."""
    *batch, m, n = shape
    rows, columns = tile
    tiles = (*batch, -(-m // rows), -(-n // columns))
    powers = torch.randint(-binades, binades, tiles, generator=generator).float()
    powers = powers.repeat_interleave(rows, -2).repeat_interleave(columns, -1)[..., :m, :n]
    return torch.randn(shape, generator=generator) * torch.exp2(powers)


def every_bf16() -> Tensor:
    """All 65,536 in the order of their bits, NaN and Inf among them."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def every_amax(block: int, count: int, width: int) -> Tensor:
    """[.., width]: each of `count` magnitudes of BF16 is the largest of a block, beside smaller ones."""
    blocks = torch.arange(count, dtype=torch.int32).to(torch.int16).view(-1, 1).expand(-1, block).clone()
    blocks[:, 1::2] = (blocks[:, 1::2] - torch.arange(block // 2, dtype=torch.int16) * 40).clamp_min(0)
    blocks[:, ::3] |= -(1 << 15)  # signs
    return blocks.view(torch.bfloat16).view(-1, width)
