"""Every product there is: 65,536 BF16 activations × 256 codes × 256 scale bytes, in each form of the kernel.

    x · value(code) · number(byte)        exact in FP64 (8 + 4 + 4 bits), rounded once to FP32

Of E2M1 a byte has a code twice: the second meets an activation of 0. The values of codes are torch's, or
those of `formats.encoding`. Where a weight alone is beyond FP32, any result that is not finite will do.

    python tests/lowering/every_product.py [--forms avx2 …] [--scales 0 100 …]        17 minutes of one core

Without --forms, all forms but those that need an emulator, in which every call takes seconds.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from cpp_forms import EMULATED, FORMS, library, pointer, unit
from tqdm import tqdm

from mxcompile.formats import TWO_LEVEL, Format, stored_form
from mxcompile.formats.elements import E2M1, E4M3, E5M2, INT8
from mxcompile.formats.encoding import element_values

FORMATS = {elem.name.upper(): Format(elem=elem) for elem in (E4M3, E5M2, INT8, E2M1)}
FORMATS["NVFP4"] = stored_form(torch.float4_e2m1fn_x2, TWO_LEVEL)
"""By the name of the class in the headers."""

ELEMS = {name: form.elem for name, form in FORMATS.items()}
_ROWS = 1024

_FUNCTION = """
extern "C" int64_t differing_{elem}(const Bfloat16* x, const uint8_t* codes, const uint8_t* scales,
                                    const double* weights, float* out) {{
  const float* no_bias = nullptr;
  weight_only_mm(x, Weight<{elem}>{{codes, scales, {k}}}, no_bias, {rows}, 256, 1, out);
  int64_t count = 0;
  for (int64_t m = 0; m < {rows}; m++) {{
    double activation = widen(x[m * {k}]);
    for (int64_t n = 0; n < 256; n++) {{
      float found = out[m * 256 + n], right = static_cast<float>(activation * weights[n]);
      bool beyond = std::isfinite(weights[n]) && !std::isfinite(static_cast<float>(weights[n]));
      bool same = found == right || (found != found && right != right) || (beyond && !std::isfinite(found));
      count += !same;
    }}
  }}
  return count;
}}
"""
SOURCE = "\n".join(
    ["#include <cmath>"]
    + [_FUNCTION.format(elem=name, rows=_ROWS, k=elem.per_byte) for name, elem in ELEMS.items()]
)
"""C++ that follows `weight_only_mm.h`; `differing` calls it."""


def every_byte(elem: str) -> torch.Tensor:
    """256 bytes with every code, all codes of a byte the same: beyond FP32 together or not at all."""
    every = torch.arange(256, dtype=torch.uint8)
    return every if ELEMS[elem].per_byte == 1 else every % 16 * 17


def first_codes(stored: torch.Tensor, elem: str) -> torch.Tensor:
    """The first element of every byte of `stored`, as `element_values` takes it."""
    return stored.view(ELEMS[elem].dtype) if ELEMS[elem].per_byte == 1 else stored & 15


def scale_numbers(scales: torch.Tensor, elem: str) -> torch.Tensor:
    """FP64 numbers that bytes of `scales` stand for."""
    if FORMATS[elem].two_level:
        return scales.view(torch.float8_e4m3fn).double()
    return torch.where(scales == 255, torch.nan, torch.exp2(scales.double() - 127))


def differing(functions: Any, elem: str, scale: int, step: int = 1) -> int:
    """How many products of activations, in 64 calls or every `step`-th of these, and all codes are wrong.

    All are under one scale byte. They come in order of their bits, because the kernel tells calls of ordinary
    exponents and others apart.
    """
    activations = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    codes = every_byte(elem)
    scales = torch.full((256,), scale, dtype=torch.uint8)
    weights = element_values(first_codes(codes, elem), ELEMS[elem]).double() * scale_numbers(scales, elem)
    if ELEMS[elem].per_byte > 1:
        activations = torch.stack([activations, torch.zeros_like(activations)], 1)
    out = torch.empty(_ROWS, 256)
    function = getattr(functions, f"differing_{elem}")
    function.restype = ctypes.c_int64
    operands = [*map(pointer, (codes, scales, weights, out))]
    return sum(function(pointer(some), *operands) for some in activations.split(_ROWS)[::step])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    native = [form for form in FORMS if form not in EMULATED]
    parser.add_argument("--forms", nargs="*", choices=FORMS, default=native)
    parser.add_argument("--scales", nargs="*", type=int, default=range(256))
    options = parser.parse_args()
    wrong = 0
    source = unit("weight_only_mm.h", [SOURCE])
    with tempfile.TemporaryDirectory() as folder:
        for form in options.forms:
            functions = library(form, source, Path(folder))
            for elem in ELEMS:
                bar = tqdm(options.scales, desc=f"{form}, {elem}", leave=False)
                wrong_products = sum(differing(functions, elem, scale) for scale in bar)
                wrong += wrong_products
                count = len(options.scales) << 24
                sys.stdout.write(f"{form}, {elem}: {wrong_products} of {count:,} products differ\n")
                sys.stdout.flush()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
