"""Whether a chip casts BF16 with two elements in a register, as `kernels.packed` does."""

from __future__ import annotations

from functools import cache

from mxcompile.lowering.targets import Target

_PTX = (9, 1)  # the first version that converts BF16 to FP8: CUDA 13.1, in Triton from 3.7 on


@cache
def converts(target: Target) -> bool:
    """Whether `target` converts pairs of BF16 to FP8, and the installed Triton's assembler supports it."""
    if not isinstance(target.arch, int) or target.arch < 100:
        return False
    try:
        from triton.backends.nvidia.compiler import get_ptxas, ptx_get_version

        return bool(ptx_get_version(get_ptxas(target.arch).version) >= 10 * _PTX[0] + _PTX[1])
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return False  # no Triton, or one with other names: `kernels.tiles` casts


def calculates(target: Target) -> bool:
    """Whether `target` has arithmetic on pairs of BF16 and on pairs of 16-bit integers."""
    return isinstance(target.arch, int) and target.arch >= 90
