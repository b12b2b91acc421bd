"""CPUs as targets: this machine's CPU, a CPU that multiplies in BF16, and a CPU that multiplies in FP32."""

from __future__ import annotations

from typing import Any

import torch

from mxcompile.lowering.chips.target import Target
from mxcompile.lowering.cpu.features import features


def _cpu(name: str, chips: str, slow_dtypes: frozenset[torch.dtype], **columns: Any) -> Target:
    return Target(name=name, device="cpu", chips=chips, stores_fp8=True, slow_dtypes=slow_dtypes, **columns)


TARGETS = (
    _cpu(
        "cpu",
        "this machine's CPU",
        features().slow_dtypes,
        integers=features().integers,
        no_integers=features().no_integers,
        many_rows=features().many_rows,
        few_rows=features().few_rows,
    ),
    _cpu("cpu_bf16", "a CPU, its products in BF16", frozenset()),
    _cpu("cpu_fp32", "a CPU, its products in FP32", frozenset({torch.bfloat16, torch.float16})),
)
