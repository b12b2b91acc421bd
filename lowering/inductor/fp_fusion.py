"""Whether compilers make one operation, with one rounding, of a · b + c: stated for every kernel.

Triton 3.10 changes its default. Triton 3.9 warns of that where a compile states nothing. Inductor states it
for its loops, and from torch 2.15 on for templates.
"""

from __future__ import annotations

import os

import torch
from torch._inductor import config, utils

_VARIABLE = "TRITON_DEFAULT_FP_FUSION"


def stated() -> dict[str, bool]:
    """The option for a kernel in the graph that is being compiled, as Inductor's loops have it."""
    return {"enable_fp_fusion": not config.emulate_precision_casts}


def ask_for_fp8_types() -> None:
    """Let Inductor remember which FP8 types Triton has for the current GPU.

    From torch 2.15 on it asks Triton by options that state nothing. With the variable set, Triton does not
    warn, so that a program whose own kernels state nothing still gets the warning.
    """
    ask = getattr(utils, "is_triton_fp8_dtype_supported", None)
    if ask is None:
        return
    known = _VARIABLE in os.environ
    os.environ.setdefault(_VARIABLE, "1")
    try:
        ask(torch.float8_e5m2, torch.device("cuda"))
    finally:
        if not known:
            del os.environ[_VARIABLE]
