"""Offline code generation: the code that Inductor and Triton would run on a GPU, without the GPU."""

from mxcompile.offline.estimate import Estimate, Work
from mxcompile.offline.generate import codegen
from mxcompile.offline.launch import Kernel, Launch, Step
from mxcompile.offline.rates import Range, Rates
from mxcompile.offline.result import CodegenResult, side_by_side

__all__ = [
    "CodegenResult",
    "Estimate",
    "Kernel",
    "Launch",
    "Range",
    "Rates",
    "Step",
    "Work",
    "codegen",
    "side_by_side",
]
