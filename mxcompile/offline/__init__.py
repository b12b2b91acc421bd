"""Offline code generation: the code that Inductor and Triton would run on a GPU, without the GPU."""

from mxcompile.offline.estimate import Estimate as Estimate
from mxcompile.offline.estimate import Work as Work
from mxcompile.offline.generate import codegen as codegen
from mxcompile.offline.launch import Kernel as Kernel
from mxcompile.offline.launch import Launch as Launch
from mxcompile.offline.launch import Step as Step
from mxcompile.offline.rates import Range as Range
from mxcompile.offline.rates import Rates as Rates
from mxcompile.offline.result import CodegenResult as CodegenResult
from mxcompile.offline.result import side_by_side as side_by_side
