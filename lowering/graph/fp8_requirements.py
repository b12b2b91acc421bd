"""The requirements of the vendor's FP8 GEMM, each with the reason for records if it is violated.

Source: the checks of `torch._scaled_mm` (torch/_meta_registrations.py, ATen/native/cuda/ScaledBlas.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mxcompile.formats import E5M2, WHOLE, Tile
from mxcompile.graph.tags import is_empty, tensor, value_of
from mxcompile.ops.view import Product

_MULTIPLE = 16
"""The sizes of the right operand are multiples of this."""

_HALVES = (torch.bfloat16, torch.float16)

_ALIGNED = 4
"""The number of scales along their innermost dimension is a multiple of this: 16 bytes."""

_BLOCKS_SINCE = (12, 9)
"""The first CUDA whose GEMM takes block scales."""


class Problem:
    """The sizes and formats of `product`, whose operands are FP8 with FP32 scales.

    lhs, rhs: formats of the operands. device: device type of the target's tensors.
    """

    def __init__(self, product: Product, device: str) -> None:
        self.lhs, self.rhs = product.forms
        self.out, self.a, self.b = map(value_of, (product.node, product.a, product.b))
        self.bias, self.device = tensor(product.bias), device

    @property
    def odd(self) -> dict[str, Any]:
        """The sizes of the right operand that are not multiples of 16, by name."""
        sizes = {"k": self.b.shape[0], "n": self.b.shape[1]}
        return {key: size for key, size in sizes.items() if not isinstance(size, int) or size % _MULTIPLE}

    @property
    def is_empty(self) -> bool:
        """Whether a size is 0."""
        return is_empty((*self.out.shape, self.b.shape[0]))

    @property
    def in_blocks(self) -> bool:
        """Whether the left operand has several scales along the contraction."""
        return self.lhs.tile.along != WHOLE

    @property
    def num_blocks(self) -> Any:
        """The number of blocks of the right operand along the contraction."""
        return -(-self.a.shape[1] // self.rhs.tile.along)


@dataclass(frozen=True, slots=True)
class Requirement:
    """holds: whether a problem satisfies it. reason: the reason if a problem does not."""

    holds: Callable[[Problem], bool]
    reason: Callable[[Problem], str]


def _cuda_has_blocks(_: Problem) -> bool:
    version = torch.version.cuda
    return version is None or tuple(map(int, version.split(".")[:2])) >= _BLOCKS_SINCE


def _no_multiples(problem: Problem) -> str:
    sizes = ", ".join(f"{key}={size}" for key, size in problem.odd.items()) or "empty"
    return f"the FP8 GEMM takes multiples of {_MULTIPLE} ({sizes})"


def _takes_elements(problem: Problem) -> bool:
    both = problem.lhs.elem == problem.rhs.elem == E5M2
    return not both and not (problem.lhs.tile == Tile.CHANNEL and problem.rhs.elem == E5M2)


def _takes_bias(problem: Problem) -> bool:
    bias, dtype = problem.bias, problem.out.dtype
    return bias is None or (bias.ndim == 1 and bias.dtype is dtype and dtype in _HALVES)


def _rows_are_aligned(problem: Problem) -> bool:
    rows = problem.a.shape[0]
    return isinstance(rows, int) and rows % _ALIGNED == 0


REQUIREMENTS = (
    Requirement(lambda p: p.a.ndim == 2, lambda _: "no FP8 GEMM for batches of matrices"),
    Requirement(lambda p: p.out.device.type == p.device, lambda _: "it is not on the target's device"),
    Requirement(lambda p: not p.odd and not p.is_empty, _no_multiples),
    Requirement(_takes_elements, lambda _: "the FP8 GEMM takes no E5M2 on the right"),
    Requirement(
        lambda p: p.lhs.tile != Tile.CHANNEL or p.out.dtype is torch.bfloat16,
        lambda _: "the FP8 GEMM with a scale per channel gives BF16",
    ),
    Requirement(
        lambda p: not p.in_blocks or _cuda_has_blocks(p),
        lambda _: f"the FP8 GEMM takes block scales from CUDA 12.9 on (this is {torch.version.cuda})",
    ),
    Requirement(
        lambda p: not p.in_blocks or _rows_are_aligned(p),
        lambda p: f"the FP8 GEMM with block scales takes multiples of {_ALIGNED} rows (m={p.a.shape[0]})",
    ),
    Requirement(
        lambda p: not p.in_blocks or p.rhs.tile.across == 1 or p.num_blocks % _ALIGNED == 0,
        lambda p: f"the FP8 GEMM takes multiples of {_ALIGNED} blocks along k ({p.num_blocks})",
    ),
    Requirement(_takes_bias, lambda _: "the FP8 GEMM takes a vector bias in its result's half precision"),
)
"""The requirements, in order: the record has the reason of the first that is violated."""


def unmet(problem: Problem) -> str:
    """Returns the reason why the vendor's FP8 GEMM does not take `problem`, or ""."""
    return next((row.reason(problem) for row in REQUIREMENTS if not row.holds(problem)), "")
