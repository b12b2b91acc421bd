"""Casts that store a matrix in both layouts have no ``min.NaN`` and no ``max.NaN`` on NVIDIA's chips.

See `lowering.kernels.tiles`. The producer of each cast takes the larger of two values and lets NaN through.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch
from helpers.casts import encode_packed_both, quantize_both, quantize_operands
from helpers.paces import mostly_slow
from helpers.rendered import compiled
from torch import Tensor

from mxcompile import ops
from mxcompile.formats import ELEM_TYPES
from mxcompile.lowering.targets import TARGETS, Target

BF16, F32 = torch.bfloat16, torch.float32
NVIDIA = [name for name, target in TARGETS.items() if isinstance(target.arch, int)]
FP4 = ["e2m1 1x32 rceil", "e2m1 16x16 two-level"]
FP8 = [
    "e5m2 tensor nearest delayed:4:0",
    "e4m3 tensor nearest",
    "e4m3 channel nearest",
    "e4m3 1x128 pow2",
    "e4m3 128x128 nearest",
]
OVER = ["-1 elements", "-2 elements transposed"]
OWN = ["-1 elements", "-1 scales", "-2 elements transposed"]
NAMES = ["mx e4m3 rceil", "mx e5m2 floor", "mx e4m3 even", *FP4, *FP8]


def cast(name: str, target: Target) -> Callable[..., object]:
    """A function of a matrix, and of its FP32 scales or amax along both dimensions, if it reads them."""
    if name in FP4:
        return lambda x, *amax: encode_packed_both(x, name, name, *(amax or (None, None)))
    if name in FP8:
        if "128" in name:
            return lambda x: ops.cast(x, [f"{name} @{copy}" for copy in OWN])
        return lambda x, *scales: ops.cast(x, [f"{name} @{copy}" for copy in OVER], None, 0, scales)
    _, elem, rounding = name.split()
    dtype = ELEM_TYPES[elem].dtype
    if target.native:
        return lambda x: quantize_both(x, dtype, rounding)
    return lambda x: quantize_operands(x, None, dtype, rounding, BF16, "codes", "codes")


def cases() -> Iterator[tuple[str, str, torch.dtype]]:
    for target in map(TARGETS.get, NVIDIA):
        for name in NAMES:
            if name not in FP4 + FP8 or (target.fp4_scales if name in FP4 else target.fp8_tiles):
                yield from ((target.name, name, dtype) for dtype in (BF16, F32))


SCALES = {"tensor": ((1, 1), (1, 1)), "channel": ((1024, 1), (1, 1024)), "two-level": ((1,), (1,))}
QUICK = ("sm_90", FP8[0], BF16), ("sm_100", "mx e5m2 floor", F32)


@pytest.mark.parametrize(("target", "name", "dtype"), mostly_slow(cases(), *QUICK, rows=True))
def test_cast_in_both_layouts_has_no_extreme_that_propagates_nan(target: str, name: str, dtype: torch.dtype):
    scales = next((shapes for word, shapes in SCALES.items() if word in name), ())
    inputs = [torch.empty(1024, 1024, dtype=dtype, device="meta")]
    inputs += [torch.empty(shape, dtype=F32, device="meta") for shape in scales]
    stores = cast(name, TARGETS[target])

    def function(x: Tensor, *scales: Tensor) -> list[Tensor]:
        return [result for result in stores(x.relu(), *scales) if result.numel()]

    binary, others = compiled(function, inputs, TARGETS[target])
    assert not others
    assert re.search(r"\bst\.global", binary.text["ptx"])
    assert re.findall(r"\b(?:min|max)\S*\.NaN\S*", binary.text["ptx"]) == []
