"""Which chips cast BF16 two elements a register, as `kernels.packed` does."""

from __future__ import annotations

from functools import cache

from mxcompile.lowering.targets import Target

_PTX = (9, 1)  # the first whose conversion to FP8 reads BF16: that of CUDA 13.1, in Triton from 3.7 on


@cache
def converts(target: Target) -> bool:
    """Whether `target` converts pairs of BF16 to FP8, and the assembler of the installed Triton knows how."""
    if not isinstance(target.arch, int) or target.arch < 100:
        return False
    try:
        from triton.backends.nvidia.compiler import get_ptxas, ptx_get_version

        return bool(ptx_get_version(get_ptxas(target.arch).version) >= 10 * _PTX[0] + _PTX[1])
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return False  # no Triton, or one that names them otherwise: `kernels.tiles` serves


def calculates(target: Target) -> bool:
    """Whether `target` calculates in pairs of BF16 and of 16-bit integers."""
    return isinstance(target.arch, int) and target.arch >= 90
