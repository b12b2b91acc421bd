"""What a CPU multiplies well, of the capabilities of real machines."""

from __future__ import annotations

import pytest
import torch

from mxcompile.lowering.cpu import AMX, INT16
from mxcompile.lowering.cpu.features import features, features_of
from mxcompile.lowering.targets import TARGETS

X86 = {"architecture": "x86_64", "avx2": True}
AVX512 = X86 | {"avx512_f": True, "avx512_bw": True, "avx512_vnni": True}
GENOA = AVX512 | {"avx512_bf16": True}
SAPPHIRE_RAPIDS = GENOA | {"avx512_fp16": True, "amx_bf16": True, "amx_tile": True}
WITHOUT_AMX = {**SAPPHIRE_RAPIDS, "amx_bf16": False}
ARM = {"architecture": "arm64", "neon": True, "fp16_arith": True}
GRAVITON2 = ARM | {"dot": True}
GRAVITON3 = GRAVITON2 | {"bf16": True, "i8mm": True, "sve": True, "sve_bf16": True}

MACHINES = {
    "Zen 3": (X86, "", "AVX2", {torch.bfloat16, torch.float16}),
    "Ice Lake": (AVX512, "", "AVX-512", {torch.bfloat16, torch.float16}),
    "Genoa": (GENOA, "", "AVX-512 BF16", {torch.float16}),
    "Genoa, masked": (GENOA, "AVX2", "AVX2", {torch.bfloat16, torch.float16}),
    "Genoa, masked in vain": (GENOA, "no such word", "AVX-512 BF16", {torch.float16}),
    "Sapphire Rapids": (SAPPHIRE_RAPIDS, "", "AMX BF16", set()),
    "Sapphire Rapids without AMX": (WITHOUT_AMX, "avx512_core_bf16", "AVX-512 BF16", {torch.float16}),
    "Cortex-A72": (ARM, "", "NEON", {torch.bfloat16, torch.float16}),
    "Graviton 2": (GRAVITON2, "", "NEON", {torch.bfloat16, torch.float16}),
    "Graviton 3": (GRAVITON3, "", "SVE BF16", {torch.float16}),
}


@pytest.mark.parametrize("name", MACHINES)
def test_capabilities_decide_name_and_slow_dtypes(name: str):
    capabilities, max_isa, class_name, slow = MACHINES[name]
    cpu = features_of(capabilities, max_isa)
    assert cpu.name == class_name
    assert cpu.slow_dtypes == slow
    assert ("run in FP32" in cpu.consequence) == bool(slow)


def test_this_machine_decides_the_target():
    assert TARGETS["cpu"].slow_dtypes == features().slow_dtypes
    has_bf16 = bool(features().bf16)
    assert (torch.bfloat16 in TARGETS["cpu"].slow_dtypes) != has_bf16


@pytest.mark.parametrize(
    ("capabilities", "max_isa", "instructions"),
    [
        (X86, "", "AVX2"),
        (AVX512, "", "AVX-512 VNNI"),
        (GENOA, "", "AVX-512 VNNI"),
        (GENOA, "AVX512_CORE", ""),
        (GENOA, "AVX2", "AVX2"),
        (SAPPHIRE_RAPIDS, "", "AVX-512 VNNI"),
        (SAPPHIRE_RAPIDS, "AVX512_CORE_BF16", "AVX-512 VNNI"),
        (ARM, "", ""),
        (GRAVITON2, "", "DotProd"),
        (GRAVITON3, "", "I8MM"),
    ],
)
def test_integers_are_multiplied_where_they_are_faster_than_fp32(
    capabilities, max_isa: str, instructions: str
):
    assert features_of(capabilities, max_isa).integers == instructions


@pytest.mark.parametrize(
    ("capabilities", "max_isa", "kernel"),
    [
        (X86, "", INT16),
        (GENOA, "", ""),
        (GENOA, "AVX2", INT16),
        (SAPPHIRE_RAPIDS, "", AMX),
        (SAPPHIRE_RAPIDS, "AVX512_CORE_BF16", ""),
        (GRAVITON3, "", ""),
    ],
)
def test_many_rows_of_bf16_have_a_kernel(capabilities, max_isa: str, kernel: str):
    assert features_of(capabilities, max_isa).many_rows == kernel


@pytest.mark.parametrize(
    ("capabilities", "rows"),
    [(X86, 16), (GENOA, 16), (SAPPHIRE_RAPIDS, 6), (GRAVITON2, 16), (GRAVITON3, 0), ({}, 0)],
)
def test_few_rows_of_bf16_have_a_kernel(capabilities, rows: int):
    assert features_of(capabilities).few_rows == rows


def test_vectors_follow_the_mask():
    assert features_of(GENOA, "AVX2").vectors == "AVX2"


@pytest.mark.parametrize(
    ("capabilities", "max_isa", "reasons"),
    [
        (X86, "", {}),
        (GENOA, "AVX512_CORE", dict.fromkeys((torch.bfloat16, torch.float32), "no kernel multiplies bytes")),
        (GENOA, "", {}),
        (SAPPHIRE_RAPIDS, "", {torch.bfloat16: "BF16 by AMX is faster"}),
        (SAPPHIRE_RAPIDS, "AVX512_CORE_BF16", {}),
        (ARM, "", dict.fromkeys((torch.bfloat16, torch.float32), "no kernel multiplies bytes on NEON")),
        (GRAVITON2, "", {}),
        (
            GRAVITON3,
            "",
            {torch.bfloat16: "with scales, integers take as many instructions as BF16 by SVE BF16"},
        ),
    ],
)
def test_products_that_do_not_run_in_integers_have_a_reason(capabilities, max_isa: str, reasons: dict):
    reasons_by_dtype = features_of(capabilities, max_isa).no_integers
    assert reasons_by_dtype.keys() == reasons.keys()
    assert all(reasons_by_dtype[dtype].startswith(words) for dtype, words in reasons.items())
