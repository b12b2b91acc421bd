"""Code for a model on the meta device under a policy of one rule, and its one product."""

from __future__ import annotations

from typing import Any

import torch
from helpers.policies import every
from torch import Tensor, nn

from mxcompile.offline import CodegenResult, codegen
from mxcompile.offline.launch import Kernel, Launch

BF16 = torch.bfloat16


def generate(
    model: nn.Module,
    *inputs: Tensor | tuple[int, ...],
    target: str = "sm_100",
    use: Any = "mxfp8",
    training: bool = False,
    dtype: torch.dtype = BF16,
    **options: Any,
) -> CodegenResult:
    """inputs: tensors, or the shapes of meta tensors in `dtype`, to which the model is moved."""
    tensors = [x if isinstance(x, Tensor) else torch.empty(x, device="meta", dtype=dtype) for x in inputs]
    options = {"target": target, "training": training, "policy": every(use), **options}
    return codegen(model.to("meta", dtype), *tensors, **options)


def product_of(result: CodegenResult) -> tuple[Launch, Kernel]:
    """The launch of the one product, and its kernel."""
    (launch,) = (launch for launch in result.launches if launch.gemms)
    assert launch.generated, launch.kernel
    return launch, result.kernel(launch)


def assert_clean(result: CodegenResult) -> None:
    """Every kernel fits the chip, and none spills registers."""
    assert (result.problems, result.spilling) == ((), ())
