"""Offline code generation: what Inductor and Triton would run on a GPU, made on a machine without it."""

from mxcompile.offline.bounds import Bound
from mxcompile.offline.generate import codegen
from mxcompile.offline.result import CodegenResult, Kernel, Launch
from mxcompile.offline.step import Step, side_by_side

__all__ = ["Bound", "CodegenResult", "Kernel", "Launch", "Step", "codegen", "side_by_side"]
