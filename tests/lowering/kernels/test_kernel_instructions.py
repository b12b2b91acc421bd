"""What the generated casts and products compile to on every target with an MX GEMM: instructions, registers.

Of ordinary shapes, each operator by itself; ``tests/codegen`` has what is fused with them.
"""

from __future__ import annotations

import re

import pytest
import torch
from helpers.casts import encode_packed, quantize, quantize_both, scaled_mm
from helpers.paces import mostly_slow
from helpers.packed_operands import ALONG, MXFP4, NVFP4
from helpers.rendered import Binary, compiled
from torch import Tensor

from mxcompile import ops
from mxcompile.errors import TargetError
from mxcompile.formats import ELEM_TYPES, Rounding, ScaleLayout, num_blocks
from mxcompile.formats.scale_tiles import tiled_length
from mxcompile.lowering.chips.tiles import NO_ROW, Unsupported
from mxcompile.lowering.choices import configs as choices
from mxcompile.lowering.choices.configs import chosen, tiled_configs
from mxcompile.lowering.optional import triton_release
from mxcompile.lowering.targets import TARGETS, Target
from mxcompile.lowering.templates import scaled_grouped_mm_tiled, vendor
from mxcompile.offline.machine_code import parse

GPUS = [name for name, target in TARGETS.items() if target.arch is not None]
NATIVE = [name for name in GPUS if TARGETS[name].native]
TENSOR_MEMORY = [name for name in GPUS if TARGETS[name].tmem_columns]
MMA = {
    "sm_100": r"tcgen05\.mma\S*kind::mxf8f6f4\.block_scale",
    "sm_103": r"tcgen05\.mma\S*kind::mxf8f6f4\.block_scale",
    "sm_120": r"mma\.sync\S*kind::mxf8f6f4\.block_scale\S*ue8m0",
    "gfx950": r"v_mfma_scale_f32_\d+x\d+x\d+_f8f6f4",
}
BF16_MMA = r"wgmma\.mma_async\S*bf16|mma\.sync\S*bf16|tcgen05\.mma\S*kind::f16|v_mfma_f32_\S*bf16"
ACCELERATOR = r"cp\.async\.bulk\.tensor\.\dd\.shared"
WIDE_LOAD = (
    r"ld\.global\S*\.v[48]\.b32|cp\.async\.cg\.shared\.global"
    r"|global_load_(?:lds_)?dwordx4|buffer_load_dwordx4"
)
WIDE_STORE = r"st\.global\S*\.v[48]\.b32|global_store_dwordx[24]|buffer_store_dwordx[24]"
CONVERT = r"cvt\.rn\.satfinite\.e4m3x2\.|v_cvt_scalef32_pk_fp8_f32|v_cvt_pk_fp8_f32"
E4M3, E5M2, BF16, F32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32
FORMS = {"fprop": (True, True), "dgrad": (True, False), "wgrad": (False, False)}
FEW, MANY = 16, 4096


@pytest.fixture(autouse=True)
def ours(monkeypatch):
    """The templates, also where the vendor's product is the default."""
    monkeypatch.setattr(vendor, "choice", lambda *_, **__: None)


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def side(
    rows: int, k: int, scales: ScaleLayout, *, k_major: bool = True, dtype=E4M3
) -> tuple[Tensor, Tensor]:
    """Codes and scale of an operand [rows, k]."""
    qdata = meta(rows, k, dtype=dtype) if k_major else meta(k, rows, dtype=dtype).t()
    blocks = num_blocks(k)
    if scales is ScaleLayout.TILED_128X4:
        return qdata, meta(tiled_length(rows, blocks), dtype=torch.uint8)
    scale = (rows, blocks) if k_major else (blocks, rows)
    return qdata, meta(*scale, dtype=torch.uint8) if k_major else meta(*scale, dtype=torch.uint8).t()


def product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Operands of ``mx.matmul``."""
    codes, scale = b
    return [*a, codes.t(), scale.t() if scale.ndim == 2 else scale]


def multiply(*operands: Tensor) -> list[Tensor]:
    return [scaled_mm(*operands, None, BF16)]


SPILLS_BEFORE_TRITON_37 = {"sm_100", "gfx950"}
"""Chips on which Triton 3.6 allocates too few registers to a few kernels; 3.7 does not."""


def kernel(function, inputs: list[Tensor], target: str) -> tuple[Binary, str]:
    """The one kernel of `function`, and its assembly; whatever runs must fit the chip and must not spill."""
    binary, others = compiled(function, inputs, TARGETS[target])
    assert not others
    assert binary.problems == ()
    if binary.spill_bytes and triton_release() < (3, 7) and target in SPILLS_BEFORE_TRITON_37:
        pytest.skip(f"Triton 3.6 spills {binary.spill_bytes} bytes in this kernel on {target}")
    assert binary.spill_bytes == 0
    assert binary.registers <= TARGETS[target].max_registers
    return binary, binary.text.get("ptx") or binary.text["amdgcn"]


def casts(scales: ScaleLayout) -> dict:
    word = str(scales)
    return {
        "rowwise": lambda x: quantize(x, -1, E4M3, "rceil", False, word),
        "columnwise": lambda x: quantize(x, -2, E4M3, "rceil", False, word),
        "both": lambda x: quantize_both(x, E4M3, "rceil", word),
    }


@pytest.mark.parametrize("target", mostly_slow(NATIVE, "sm_100", "gfx950"))
@pytest.mark.parametrize("layout", ["rowwise", "columnwise", "both"])
def test_mx_casts_compile_to_wide_accesses_and_one_rounding(layout, target):
    for scales in {ScaleLayout.ROW_MAJOR, TARGETS[target].scale_layout}:
        _, text = kernel(casts(scales)[layout], [meta(4096, 4096, dtype=BF16)], target)
        assert re.search(WIDE_LOAD, text)
        assert re.search(WIDE_STORE, text)
        assert re.search(CONVERT, text)
        assert not re.search(r"cvt\.rz\.f16\.f32", text)  # through FP16 an element would be rounded twice
        assert not re.search(r"mul\S*\.ftz|ex2|lg2", text)


@pytest.mark.parametrize("target", ["sm_100", "gfx950"])
@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize("elem", ELEM_TYPES.values(), ids=lambda elem: elem.name)
def test_mx_casts_of_fp32_compile_in_every_format(elem, rounding, target):
    """Of FP32, which takes the most registers."""
    x = meta(4096, 4096, dtype=F32)
    kernel(lambda x: quantize_both(x, elem.dtype, str(rounding)), [x], target)


FP4 = ["sm_100", "sm_103", "sm_120", "gfx950"]


@pytest.mark.parametrize("target", mostly_slow(FP4, "sm_100", "gfx950"))
@pytest.mark.parametrize("shape", [(4096, 4096), (8, 1000, 1001)], ids=str)
@pytest.mark.parametrize("dim", [-1, -2])
def test_packed_fp4_casts_compile_to_the_chips_conversion(dim, shape, target):
    """Also of batches of odd matrices, whose elements are read one by one."""
    layout = ScaleLayout.ROW_MAJOR if len(shape) == 3 else TARGETS[target].scale_layout
    word = "e2m1 1x32 rceil" if target == "gfx950" else "e2m1 1x16 two-level"
    amax = [meta(1, dtype=F32)] if "two-level" in word else []

    def function(x: Tensor, *amax: Tensor) -> list[Tensor]:
        return list(encode_packed(x, dim, word, None, 0, *(amax or (None,)), str(layout)))

    _, text = kernel(function, [meta(*shape, dtype=BF16), *amax], target)
    assert target == "gfx950" or re.search(r"cvt\.rn\.satfinite\.e2m1x2\.f32", text)
    assert len(shape) == 3 or re.search(WIDE_LOAD, text)
    assert not re.search(r"ex2|lg2", text)


def on_the_mx_instruction(operands: list[Tensor], target: str, *, wide: bool = True) -> tuple[Binary, str]:
    binary, text = kernel(multiply, operands, target)
    assert re.search(MMA[target], text)
    assert not re.search(BF16_MMA, text)
    if wide:
        assert re.search(f"{WIDE_LOAD}|{ACCELERATOR}", text)
    return binary, text


@pytest.mark.parametrize("target", mostly_slow(NATIVE, "sm_100", "sm_120", "gfx950"))
@pytest.mark.parametrize(
    ("tokens", "form"), [(FEW, "fprop"), (MANY, "fprop"), (MANY, "dgrad"), (MANY, "wgrad")]
)
def test_scaled_mm_compiles_to_the_mx_instruction(tokens, form, target):
    scales, (a_k_major, b_k_major) = TARGETS[target].scale_layout, FORMS[form]
    a = side(tokens, 4096, scales, k_major=a_k_major)
    b = side(4096, 4096, scales, k_major=b_k_major)
    # elsewhere MN-major operands are gathered in narrower pieces
    wide = target in TENSOR_MEMORY or form == "fprop"
    binary, text = on_the_mx_instruction(product(a, b), target, wide=wide)
    assert re.search(f"{WIDE_STORE}|{ACCELERATOR}", text)
    if target == "sm_120" and tokens == MANY:  # scales are copied steps ahead, as codes are
        code = parse(binary.text["sass"])
        assert code.waits(code.product_loops[-1]) == 0


@pytest.mark.parametrize("target", mostly_slow(NATIVE, "sm_100", "sm_120", "gfx950"))
@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_scaled_mm_tail_of_k(tokens, target):
    scales = TARGETS[target].scale_layout
    on_the_mx_instruction(product(side(tokens, 4144, scales), side(4096, 4144, scales)), target)


@pytest.mark.parametrize("target", mostly_slow(NATIVE, "sm_100", "sm_120", "gfx950"))
def test_scaled_mm_of_two_formats(target):
    """dgrad with E5M2 gradients."""
    scales = TARGETS[target].scale_layout
    dy, w = side(MANY, 4096, scales, dtype=E5M2), side(4096, 4096, scales, k_major=False)
    on_the_mx_instruction(product(dy, w), target, wide=False)


FP4_MMA = {
    ("sm_100", MXFP4): r"tcgen05\.mma\S*kind::mxf4\.block_scale\.(scale_vec::2X|block32)",
    ("sm_100", NVFP4): r"tcgen05\.mma\S*kind::mxf4nvf4\.block_scale\.(scale_vec::4X|block16)",
    ("sm_120", MXFP4): r"mma\.sync\S*kind::mxf4nvf4\.block_scale\.scale_vec::2X\S*e2m1\.e2m1\S*ue8m0",
    ("sm_120", NVFP4): r"mma\.sync\S*kind::mxf4nvf4\.block_scale\.scale_vec::4X\S*e2m1\.e2m1\S*ue4m3",
    ("gfx950", MXFP4): r"v_mfma_scale_f32_\d+x\d+x\d+_f8f6f4.*cbsz:4 blgp:4",
}
FP4_MMA |= {("sm_103", word): FP4_MMA["sm_100", word] for word in (MXFP4, NVFP4)}
PACKED = mostly_slow(FP4_MMA, ("sm_100", NVFP4), ("sm_120", NVFP4), ("gfx950", MXFP4), rows=True)


def packed_side(
    rows: int, k: int, word: str, *, batch: tuple[int, ...] = (), tiled: bool = False
) -> tuple[Tensor, Tensor]:
    """Bytes and scale of a packed operand [rows, k]."""
    blocks = num_blocks(k, ALONG[word])
    scale = (tiled_length(rows, blocks),) if tiled else (*batch, rows, blocks)
    return meta(*batch, rows, (k + 1) // 2, dtype=torch.uint8), meta(*scale, dtype=torch.uint8)


def on_the_fp4_instruction(a, b, word: str, target: str, *, offs: Tensor | None = None) -> tuple[Binary, str]:
    """The kernel of a product with both tensors' scales and, of matrices, a bias."""
    tensors = [meta(1, dtype=F32)] * 2 if word == NVFP4 else []
    (codes, scale), operator = b, ops.matmul if offs is None else ops.grouped_matmul
    bias = meta(codes.shape[-2], dtype=BF16) if offs is None and codes.ndim == 2 else None
    extra = [tensor for tensor in (offs, bias) if tensor is not None]

    def function(a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, *rest: Tensor) -> list[Tensor]:
        third, *scales = rest if extra else (None, *rest)
        sb = sb if sb.ndim == 1 else sb.mT
        return [operator(a, sa, b.mT, sb, third, BF16, *[f"{word} packed"] * 2, scales or None)]

    binary, text = kernel(function, [*a, codes, scale, *extra, *tensors], target)
    assert re.search(FP4_MMA[target, word], text)
    assert not re.search(BF16_MMA, text)
    assert not re.search(r"kind::mxf8f6f4", text)
    return binary, text


@pytest.mark.parametrize(("target", "word"), PACKED)
@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_packed_mm_compiles_to_the_fp4_instruction(tokens, target, word):
    """By pointers, scales as casts write them; rows of whole steps, and rows that end inside of one."""
    tiled = TARGETS[target].scale_layout is ScaleLayout.TILED_128X4
    for k in (4096, 4128):
        sides = (packed_side(rows, k, word, tiled=tiled) for rows in (tokens, 4096))
        _, text = on_the_fp4_instruction(*sides, word, target)
        assert re.search(f"{WIDE_LOAD}|{ACCELERATOR}", text)


@pytest.mark.parametrize(("target", "word"), PACKED)
def test_packed_mm_of_odd_rows(target, word):
    """Bytes are gathered one by one."""
    tiled = TARGETS[target].scale_layout is ScaleLayout.TILED_128X4
    on_the_fp4_instruction(
        *(packed_side(rows, 4097, word, tiled=tiled) for rows in (MANY, 4096)), word, target
    )


@pytest.mark.parametrize("word", [MXFP4, NVFP4])
@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_packed_mm_of_a_stored_weight(tokens, word):
    """Scales of the weight lie in rows, 16 bytes of which are loaded together."""
    a, b = packed_side(tokens, 4096, word, tiled=True), packed_side(4096, 4096, word)
    on_the_fp4_instruction(a, b, word, "sm_100")


@pytest.mark.parametrize("word", [MXFP4, NVFP4])
@pytest.mark.parametrize("config", tiled_configs(TARGETS["sm_100"]), ids=str)
def test_packed_mm_tiled_copies_scales_into_tensor_memory(config, word, monkeypatch):
    monkeypatch.setattr(choices, "tiled_products", lambda *_: [config])
    a, b = (packed_side(4096, 4096, word, tiled=True) for _ in range(2))
    _, text = on_the_fp4_instruction(a, b, word, "sm_100")
    assert re.search(r"tcgen05\.cp\S*warpx4", text)  # scales reach the MMA without registers
    assert re.search(ACCELERATOR, text)
    assert ("setmaxnreg" in text) == config.warp_specialize


@pytest.mark.parametrize(("target", "word"), PACKED)
def test_packed_batched_mm_compiles_to_the_fp4_instruction(target, word):
    a, b = (packed_side(512, 1024, word, batch=(8,)) for _ in range(2))
    on_the_fp4_instruction(a, b, word, target)


@pytest.mark.parametrize(("target", "word"), PACKED)
@pytest.mark.parametrize("kind", ["rows", "few rows", "K"])
def test_packed_grouped_mm_compiles_to_the_fp4_instruction(kind, target, word, monkeypatch):
    """By pointers; of K, whose groups end anywhere, too by loads of 16 bytes."""
    monkeypatch.setattr(scaled_grouped_mm_tiled, "tiles", lambda *_: [])
    offs, m = meta(8, dtype=torch.int32), 64 if kind == "few rows" else MANY
    for k in (2048, 2080):
        a = packed_side(m, k, word)
        b = packed_side(1024, k, word, batch=() if kind == "K" else (8,))
        _, text = on_the_fp4_instruction(a, b, word, target, offs=offs)
        assert re.search(WIDE_LOAD, text)


@pytest.mark.parametrize("config", tiled_configs(TARGETS["sm_100"]), ids=str)
@pytest.mark.parametrize("form", ["dgrad", "wgrad"])
def test_scaled_mm_tiled_copies_scales_into_tensor_memory(form, config, monkeypatch):
    """Each config on operands that are MN-major; ``test_scaled_mm_choices`` has those of fprop."""
    monkeypatch.setattr(choices, "tiled_products", lambda *_: [config])
    tiled = ScaleLayout.TILED_128X4
    a, b = (side(4096, 4096, tiled, k_major=k_major) for k_major in FORMS[form])
    _, text = on_the_mx_instruction(product(a, b), "sm_100")
    assert re.search(r"tcgen05\.cp\S*warpx4", text)  # scales reach the MMA without registers
    assert re.search(ACCELERATOR, text)
    assert ("setmaxnreg" in text) == config.warp_specialize


SERVED = {
    "quantize": NATIVE,
    "fp4_cast": FP4,
    "scaled_mm": NATIVE,
    "scaled_mm_tiled": TENSOR_MEMORY,
    "fused_quantize_mm": NATIVE,
    "weight_only_mm": GPUS,
}


@pytest.mark.parametrize("family", SERVED)
def test_every_target_has_a_config_or_a_reason(family):
    for name in GPUS:
        row = getattr(TARGETS[name].tiles, family)
        assert row is not NO_ROW
        assert isinstance(row, Unsupported) == (name not in SERVED[family])


def test_a_chip_without_a_row_is_refused():
    chip = Target(name="sm_75", device="cuda")
    with pytest.raises(
        TargetError, match="weight_only_mm does not run on sm_75: no tile sizes are listed for the chip"
    ):
        chosen(chip.tiles.weight_only_mm, "weight_only_mm", chip)


@pytest.mark.parametrize("name", [name for name in GPUS if name not in NATIVE])
def test_unsupported_target_raises_with_its_reason(name):
    with pytest.raises(TargetError, match=rf"scaled_mm does not run on {name}: \w+"):
        chosen(TARGETS[name].tiles.scaled_mm, "scaled_mm", TARGETS[name])
