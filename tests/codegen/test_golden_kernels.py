"""Generated kernels, compared with golden files for the torch that is pinned for development.

``MXCOMPILE_ACCEPT=1`` writes what is generated now as the golden files. What changes from run to run, the
numbers in names and the launch data above the kernel, is left out.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

import pytest
import torch

VERSION = ".".join(torch.__version__.split(".")[:2])
FOLDER = Path(__file__).parent / "golden" / f"torch_{VERSION}"
ACCEPT = os.environ.get("MXCOMPILE_ACCEPT") == "1"


def _cast_of(operator):
    return lambda launch: {"mx.cast.default", operator} <= set(launch.operators) and not launch.gemms


def _computes(gemm):
    return lambda launch: launch.gemms == (gemm,)


CASES = {
    "sm_100_norm_to_both_casts": ("sm_100", _cast_of("aten.mul.Tensor")),
    "sm_100_swiglu_to_both_casts": ("sm_100", _cast_of("aten.div.Tensor")),
    "sm_100_gemm_with_residuals": ("sm_100", _computes("ffn.down fprop")),
    "sm_100_wgrad": ("sm_100", _computes("ffn.down wgrad")),
    "sm_90_norm_to_bf16": ("sm_90", _cast_of("aten.mul.Tensor")),
}


def _kernel(result, matches) -> str:
    """The first kernel whose launch matches, from its signature on."""
    launch = next(launch for launch in result.launches if launch.generated and matches(launch))
    source = result.kernel(launch).source
    body = source[source.index("@triton.jit") :].replace(launch.kernel, "kernel")
    lines = [line.rstrip() for line in body.splitlines()]
    return re.sub(r"\n{2,}", "\n", "\n".join(lines)).strip() + "\n"


@pytest.mark.parametrize("name", CASES)
def test_generated_kernel_equals_its_golden_file(generated, name):
    """Skipped where this torch has no golden files at all; one that is missing among others is a failure."""
    if not (ACCEPT or FOLDER.exists()):
        pytest.skip(f"no golden files for torch {VERSION}; MXCOMPILE_ACCEPT=1 writes them")
    target, matches = CASES[name]
    source = _kernel(generated(target, True), matches)
    path = FOLDER / f"{name}.txt"
    if ACCEPT:
        FOLDER.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    golden = path.read_text(encoding="utf-8")
    difference = difflib.unified_diff(
        golden.splitlines(), source.splitlines(), "golden", "generated", "", "", 3
    )
    assert source == golden, "\n".join(["MXCOMPILE_ACCEPT=1 accepts", *difference])


def test_no_golden_file_is_left_over():
    assert {path.stem for path in FOLDER.glob("*")} <= set(CASES)
