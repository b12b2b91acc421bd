"""Offline code generation: what Inductor and Triton would run on a GPU, made on a machine without it."""

from mxcompile.offline.bounds import Bound
from mxcompile.offline.generate import codegen
from mxcompile.offline.launch import Kernel, Launch
from mxcompile.offline.result import CodegenResult, side_by_side
from mxcompile.offline.step import Step

__all__ = ["Bound", "CodegenResult", "Kernel", "Launch", "Step", "codegen", "side_by_side"]
