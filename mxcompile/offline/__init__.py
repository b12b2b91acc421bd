"""Offline code generation: what Inductor and Triton would run on a GPU, made on a machine without it."""

from mxcompile.offline.generate import codegen
from mxcompile.offline.result import CodegenResult, Kernel, Launch

__all__ = ["CodegenResult", "Kernel", "Launch", "codegen"]
