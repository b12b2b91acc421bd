"""The C++ statistics of a cast in every form this machine can run, against the operator's definition."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from cpp_forms import exported, fixture_of, integer, pointer
from test_cpu_casts import SOURCES, sources
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from mxcompile import ops
from mxcompile.lowering.inductor import statistics as statistics  # registers the lowering
from mxcompile.ops.watch import FIELDS, LENGTH

FORMATS = ("e4m3 1x32 rceil", "e4m3 32x32 floor", "e5m2 1x32 even", "e5m2 32x32 ceil")
KEPT = 100


def _functions() -> Iterator[str]:
    for source, fmt in product(SOURCES, FORMATS):
        elem, tile, how = fmt.split()
        kind = f"Statistics<{elem.upper()}, Rounding::{how}, {source}>"
        sizes = "int64_t number, int64_t m, int64_t n, int64_t keep"
        head, name = f"const {source}* x, {sizes}, double* out, float* kept", f"{elem}_{tile}_{how}_{source}"
        call = f"matrices<{str(tile == '32x32').lower()}>(x, number, m, n, 2, out, keep, kept);"
        yield exported(f"columns_{name}", head, f"{kind}::{call}")
        if tile == "1x32":
            yield exported(f"rows_{name}", head, f"{kind}::rows(x, number * m, n, 2, out, keep, kept);")


forms = fixture_of("statistics.h", _functions())


def check(computed: Tensor, kept: Tensor, x: Tensor, dim: int, fmt: str):
    expected, part = ops.cast_statistics(x, dim, fmt, len(kept))
    sums = FIELDS.index("signal"), len(FIELDS)
    assert torch.equal(computed[: sums[0]], expected[: sums[0]])
    assert torch.equal(computed[sums[1] :], expected[sums[1] :])
    assert computed[slice(*sums)].tolist() == pytest.approx(expected[slice(*sums)].tolist(), rel=1e-12)
    assert torch.equal(kept.nan_to_num(7e30), part.nan_to_num(7e30))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("source", SOURCES)
def test_statistics_of_every_instruction_set_equal_the_operator(forms, source: str, fmt: str):
    """Of all magnitudes, NaN and Inf among them, in both layouts."""
    for x in sources(SOURCES[source]):
        for way, dim in (("columns", -2), ("rows", -1)):
            if way == "rows" and "32x32" in fmt:
                continue
            numbers = torch.zeros(LENGTH, dtype=torch.float64)
            kept = torch.zeros(min(KEPT, x.numel()))
            function = getattr(forms, f"{way}_{fmt.replace(' ', '_')}_{source}")
            sizes = map(integer, (*x.shape, len(kept)))
            function(pointer(x), *sizes, pointer(numbers), pointer(kept))
            check(numbers, kept, x, dim, fmt)


@pytest.mark.parametrize("keep", [0, 64])
@pytest.mark.parametrize(
    ("fmt", "dim"), [("e4m3 1x32 rceil", -1), ("e4m3 1x32 rceil", 1), ("e5m2 32x32 floor", -1)]
)
def test_compiled_statistics_call_the_kernel_once(fmt: str, dim: int, keep: int):
    """Inductor runs the kernel, once for each call of the operator."""
    x = torch.randn(3, 40, 72)
    x[1, 2, 3], x[2, 0, 5] = math.nan, math.inf

    def measure(x: Tensor) -> tuple[Tensor, Tensor]:
        return ops.cast_statistics(x, dim, fmt, keep)

    (counted, kept), (code,) = run_and_get_code(torch.compile(measure, fullgraph=True), x)
    assert code.count("mxcompile::Statistics<mxcompile::E") == 1
    check(counted, kept, x, dim, fmt)


@pytest.mark.parametrize(
    ("fmt", "dtype", "dim"),
    [
        ("", torch.float32, -1),
        ("e4m3 tensor nearest", torch.float32, -1),
        ("e2m1 1x32 rceil", torch.float32, -1),
        ("e4m3 1x32 rceil", torch.float64, -1),
        ("e4m3 32x32 rceil", torch.float32, 0),  # tiles that are not of the last two dimensions
    ],
)
def test_others_are_measured_as_they_are_defined(fmt: str, dtype: torch.dtype, dim: int):
    x = torch.randn(40, 3, 72, dtype=dtype)
    compiled = torch.compile(lambda x: ops.cast_statistics(x, dim, fmt, 9))
    (counted, kept), (code,) = run_and_get_code(compiled, x)
    assert "mxcompile::Statistics" not in code
    check(counted, kept, x, dim, fmt)
