"""A kernel launch as a value: what runs on a GPU, and what a machine without one can compile and inspect.

Every family builds a `Launch` from tensors, which may be on the meta device, and then runs it. Because the
instruction tests compile the same value, what they see is what a GPU gets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One kernel, its grid and everything it is called with.

    kernel: a `triton.jit` function. arguments: by name, tensors, integers, None. constants: by name,
    compile-time arguments. options: of the compiler, `num_warps` and `num_stages`.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, int] = field(default_factory=dict)

    @property
    def compiler_options(self) -> dict[str, int | bool]:
        """All options: also whether a · b + c is one operation, whose default changes between Tritons."""
        return {"enable_fp_fusion": True, **self.options}

    def run(self) -> None:
        """Launch on the current stream and device, the tensors'; nothing if the grid is empty."""
        if 0 not in self.grid:
            self.kernel[self.grid](**self.arguments, **self.constants, **self.compiler_options)


def power_of_two(length: int, low: int, high: int) -> int:
    """The smallest power of two that is at least `length`, kept within `low` and `high`, powers of two."""
    return max(low, min(high, 1 << max(length - 1, 0).bit_length()))


def ceil_div(a: int, b: int) -> int:
    """⌈a / b⌉."""
    return -(-a // b)
