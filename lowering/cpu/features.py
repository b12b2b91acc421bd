"""Data types that this machine's CPU multiplies fast. All other modules use these results.

A CPU without matrix instructions for BF16 (or FP16) computes such products in a loop of scalar conversions,
4 to 40 times slower than the same product in FP32 (pytorch issue 146508). So products of dtypes without
instructions run in FP32, in which their values are exact. The decision depends on instructions alone, not on
timings, so that it is the same in every run.

Source: ``torch.cpu.get_capabilities`` (cpuinfo), limited as ``ONEDNN_MAX_CPU_ISA`` limits oneDNN, which
computes PyTorch's products.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mxcompile.lowering.cpu import AMX, INT16, LEAST_ROWS, MOST_ROWS

_ISA = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI",
        "AVX512_CORE_BF16", "AVX10_1_512", "AVX512_CORE_FP16", "AVX10_1_512_AMX", "AVX512_CORE_AMX",
        "AVX10_1_512_AMX_FP16", "AVX512_CORE_AMX_FP16", "AVX10_2_512")  # fmt: skip
"""Values of ``ONEDNN_MAX_CPU_ISA``, each with all BF16 and FP16 instructions of the values before it."""

_BF16 = {
    "amx_bf16": ("AMX BF16", "AVX10_1_512_AMX"),
    "avx10_2": ("AVX10.2", "AVX10_2_512"),
    "avx512_bf16": ("AVX-512 BF16", "AVX512_CORE_BF16"),
    "sve_bf16": ("SVE BF16", ""),
    "bf16": ("NEON BF16", ""),
}
_FP16 = {
    "amx_fp16": ("AMX FP16", "AVX10_1_512_AMX_FP16"),
    "avx10_2": ("AVX10.2", "AVX10_2_512"),
    "avx512_fp16": ("AVX-512 FP16", "AVX10_1_512"),
}
_INT8 = {"i8mm": ("I8MM", ""), "dot": ("DotProd", ""), "avx512_vnni": ("AVX-512 VNNI", "AVX512_CORE_VNNI")}
_VECTORS = {
    "avx512_f": ("AVX-512", "AVX512_CORE"),
    "avx2": ("AVX2", "AVX2"),
    "sve": ("SVE", ""),
    "neon": ("NEON", ""),
}
"""Name of the instructions, and the least ISA of oneDNN that uses them, "" on ARM; the best first."""

_NO_VECTORS = "no vectors"


@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """The instructions that a CPU has.

    vectors: widest vector instructions, such as "AVX2". bf16, fp16: instructions that multiply matrices or
    vectors of BF16 or FP16, "" if there are none. int8: instructions that multiply bytes, such as "I8MM".
    """

    vectors: str
    bf16: str
    fp16: str
    int8: str = ""

    @property
    def slow_dtypes(self) -> frozenset[torch.dtype]:
        """The dtypes whose products this CPU computes faster in FP32."""
        pairs = ((torch.bfloat16, self.bf16), (torch.float16, self.fp16))
        return frozenset(dtype for dtype, instructions in pairs if not instructions)

    @property
    def integers(self) -> str:
        """The instructions that multiply matrices in MXINT8 faster than the CPU multiplies FP32, or "".

        On ARM they take fewer instructions; their time is not measured.
        """
        return self.int8 or ("AVX2" if self.vectors == "AVX2" else "")

    @property
    def many_rows(self) -> str:
        """The kernel for many rows of BF16 times a stored weight, or "" if the vendor's GEMM runs."""
        return AMX if self.bf16 == "AMX BF16" else INT16 if self.integers == "AVX2" else ""

    @property
    def few_rows(self) -> int:
        """The most rows of BF16 that ``few_rows_mm.h`` multiplies faster than the vendor's GEMM.

        Not measured on ARM, where PyTorch has kernels of its own for BF16.
        """
        if self.bf16 in ("SVE BF16", "NEON BF16") or self.vectors == _NO_VECTORS:
            return 0
        return LEAST_ROWS[AMX] - 1 if self.many_rows == AMX else MOST_ROWS

    @property
    def no_integers(self) -> dict[torch.dtype, str]:
        """The reason why products do not run in integers, by the dtype in which they run instead."""
        reasons = {}
        if not self.integers:
            reason = f"no kernel multiplies bytes on {self.name}"
            reasons = dict.fromkeys((torch.bfloat16, torch.float32), reason)
        if self.bf16 == "AMX BF16":
            reasons[torch.bfloat16] = "BF16 by AMX is faster: 18.5 ms, integers 37.2, for 512×4096×4096"
        elif self.bf16 and self.int8 in ("I8MM", "DotProd"):
            reasons[torch.bfloat16] = (
                f"with scales, integers take as many instructions as BF16 by {self.bf16}"
            )
        return reasons

    @property
    def name(self) -> str:
        """The class of CPU for records of measurements, such as "AVX2" or "AVX-512 BF16"."""
        return self.bf16 or self.vectors

    @property
    def consequence(self) -> str:
        """One line about the dtypes in which products run on this CPU."""
        matrices = ", ".join(filter(None, (self.bf16, self.fp16, self.int8)))
        has = f"{self.vectors}, {matrices}" if matrices else self.vectors
        slow = [word for word, is_native in (("BF16", self.bf16), ("FP16", self.fp16)) if not is_native]
        if not slow:
            return f"{has}: products run in the model's dtype"
        return f"{has}: no instructions for {' and '.join(slow)} products, which run in FP32"


@functools.cache
def features() -> Features:
    """Returns the features of this machine's CPU."""
    return features_of(capabilities(), os.environ.get("ONEDNN_MAX_CPU_ISA", ""))


def features_of(capabilities: Mapping[str, Any], max_isa: str = "") -> Features:
    """Returns the features of a CPU with `capabilities`, named as in ``torch.cpu.get_capabilities``.

    max_isa: value of ``ONEDNN_MAX_CPU_ISA``; "" or an unknown value limits nothing.
    """
    is_isa = max_isa.upper() in _ISA
    allowed = ("", *_ISA[: _ISA.index(max_isa.upper()) + 1]) if is_isa else ("", *_ISA)

    def first(table: Mapping[str, tuple[str, str]]) -> str:
        """Returns the name of the first instructions of `table` that the CPU has and oneDNN may use."""
        names = (name for key, (name, isa) in table.items() if capabilities.get(key) and isa in allowed)
        return next(names, "")

    return Features(
        vectors=first(_VECTORS) or _NO_VECTORS, bf16=first(_BF16), fp16=first(_FP16), int8=first(_INT8)
    )


def capabilities() -> Mapping[str, Any]:
    """Returns what this CPU has, as ``torch.cpu.get_capabilities``. True: an instruction set."""
    query = getattr(torch.cpu, "get_capabilities", None)
    if query is not None:
        present: Mapping[str, Any] = query()
        return present
    return {  # older versions of PyTorch
        "avx2": torch.cpu._is_avx2_supported(),
        "avx512_f": torch.cpu._is_avx512_supported(),
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
        "amx_bf16": torch.cpu._is_amx_tile_supported(),
    }
