"""The option whether Triton contracts a · b + c into an FMA with one rounding, set for every kernel.

Triton 3.10 changes the default, and Triton 3.9 warns if a compile does not set the option. Inductor sets it
for its loops, and from torch 2.15 on for templates.
"""

from __future__ import annotations

import os

import torch
from torch._inductor import config, utils

_VARIABLE = "TRITON_DEFAULT_FP_FUSION"


def stated() -> dict[str, bool]:
    """Returns the option for a kernel in the current graph, equal to the option of Inductor's loops."""
    return {"enable_fp_fusion": not config.emulate_precision_casts}


def cache_fp8_types() -> None:
    """Fills Inductor's cache of the FP8 types that Triton has for the current GPU.

    From torch 2.15 on Inductor queries Triton without the option, and Triton would warn. The environment
    variable avoids that; kernels of the user without the option still cause the warning.
    """
    query = getattr(utils, "is_triton_fp8_dtype_supported", None)
    if query is None:
        return
    was_set = _VARIABLE in os.environ
    os.environ.setdefault(_VARIABLE, "1")
    try:
        query(torch.float8_e5m2, torch.device("cuda"))
    finally:
        if not was_set:
            del os.environ[_VARIABLE]
