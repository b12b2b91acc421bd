"""What the default configs compile to on every target: instructions, registers, memory, without a GPU.

Launches are planned on meta tensors of ordinary shapes, so they are the ones a GPU would run.
"""

from __future__ import annotations

import pytest
import torch
from offline import Compiled, compile_launch

from mxcompile.errors import TargetError
from mxcompile.formats import ELEM_TYPES, Format, Rounding, ScaleLayout, Tile, num_blocks
from mxcompile.lowering.kernels import (
    configs,
    fused_quantize_mm,
    quantize,
    scaled_mm,
    scaled_mm_tiled,
    weight_only_mm,
)
from mxcompile.lowering.kernels.configs import tiled_configs
from mxcompile.lowering.kernels.quantize import Layout
from mxcompile.lowering.kernels.scaled_mm import Operand
from mxcompile.lowering.targets import TARGETS, Target

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
WIDE_LOAD = (
    r"ld\.global\S*\.v4\.b32|cp\.async\.cg\.shared\.global|global_load_(?:lds_)?dwordx4|buffer_load_dwordx4"
)
WIDE_STORE = r"st\.global\S*\.v4\.b32|global_store_dwordx[24]|buffer_store_dwordx[24]"
FORMS = {"fprop": (True, True), "dgrad": (True, False), "wgrad": (False, False)}
TOKENS = {"few": 16, "many": 4096}


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def operand(
    rows: int, k: int, *, k_major: bool = True, tiled: bool = False, dtype: torch.dtype = torch.float8_e4m3fn
) -> Operand:
    shape, blocks = ((rows, k), num_blocks(k)) if k_major else ((k, rows), num_blocks(k))
    qdata = meta(*shape, dtype=dtype)
    if tiled:
        flat = quantize.scale_shape(rows, k, Layout.ROWWISE, ScaleLayout.TILED_128X4)
        scale = meta(*flat, dtype=torch.uint8)
    else:
        scale = meta(*((rows, blocks) if k_major else (blocks, rows)), dtype=torch.uint8)
        scale = scale if k_major else scale.t()
    return Operand(qdata=qdata if k_major else qdata.t(), scale=scale)


def compiled(launch, target: str) -> Compiled:
    """Compile; whatever runs must fit the chip and must not spill."""
    chip = TARGETS[target]
    result = compile_launch(launch, chip)
    assert result.spilled_bytes == 0
    assert result.registers <= chip.max_registers
    assert result.shared_bytes <= chip.shared_bytes
    assert result.tmem_columns <= chip.tmem_columns
    return result


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("scales", ScaleLayout)
def test_quantize(scales, layout, target):
    x = meta(4096, 4096, dtype=torch.bfloat16)
    result = compiled(quantize.plan(x, layout, Format(), scales, TARGETS[target])[0], target)
    assert result.count(WIDE_LOAD) > 0
    assert result.count(WIDE_STORE) > 0
    chip = TARGETS[target]
    converts = result.count(r"cvt\.rn\.satfinite\.e4m3x2\.f32|v_cvt_scalef32_pk_fp8_f32|v_cvt_pk_fp8_f32")
    assert (converts > 0) == chip.encodes_fp8
    assert result.count(r"cvt\.rz\.f16\.f32") == 0  # through FP16 an element would be rounded twice
    assert result.count(r"mul\S*\.ftz|ex2|lg2") == 0


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx950"])
@pytest.mark.parametrize("tile", [Tile.ROW, Tile.SQUARE], ids=str)
@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize("elem", ELEM_TYPES.values(), ids=lambda elem: elem.name)
def test_quantize_formats(elem, rounding, tile, target):
    fmt = Format(elem=elem, rounding=rounding, tile=tile)
    x = meta(4096, 4096, dtype=torch.float32)
    compiled(quantize.plan(x, Layout.BOTH, fmt, ScaleLayout.ROW_MAJOR, TARGETS[target])[0], target)


@pytest.mark.parametrize("target", NATIVE)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_scaled_mm(tokens, form, target):
    a_k_major, b_k_major = FORMS[form]
    a, b = operand(TOKENS[tokens], 4096, k_major=a_k_major), operand(4096, 4096, k_major=b_k_major)
    result = compiled(scaled_mm.plan(a, b, None, torch.bfloat16, TARGETS[target])[0], target)
    assert result.count(MMA[target]) > 0
    assert result.count(BF16_MMA) == 0
    assert result.count(WIDE_STORE) > 0
    if TARGETS[target].scale_layout is ScaleLayout.TILED_128X4 or form == "fprop":
        assert result.count(WIDE_LOAD) > 0  # the others gather MN-major operands in narrower pieces


@pytest.mark.parametrize("target", NATIVE)
@pytest.mark.parametrize("tokens", TOKENS)
def test_scaled_mm_tail_of_k(tokens, target):
    a, b = operand(TOKENS[tokens], 4144), operand(4096, 4144)
    result = compiled(scaled_mm.plan(a, b, None, torch.bfloat16, TARGETS[target])[0], target)
    assert result.count(MMA[target]) > 0
    assert result.count(WIDE_LOAD) > 0


@pytest.mark.parametrize("target", NATIVE)
def test_scaled_mm_of_two_formats(target):
    """dgrad with E5M2 gradients."""
    dy, w = operand(4096, 4096, dtype=torch.float8_e5m2), operand(4096, 4096, k_major=False)
    result = compiled(scaled_mm.plan(dy, w, None, torch.bfloat16, TARGETS[target])[0], target)
    assert result.count(MMA[target]) > 0
    assert result.count(BF16_MMA) == 0


@pytest.mark.parametrize("target", TENSOR_MEMORY)
@pytest.mark.parametrize("form", FORMS)
def test_scaled_mm_tiled(form, target):
    a_k_major, b_k_major = FORMS[form]
    a, b = (
        operand(4096, 4096, k_major=a_k_major, tiled=True),
        operand(4096, 4096, k_major=b_k_major, tiled=True),
    )
    bias = meta(4096, dtype=torch.bfloat16)
    for choice, config in enumerate(tiled_configs(TARGETS[target])):
        launch, _ = scaled_mm_tiled.plan(a, b, bias, torch.bfloat16, TARGETS[target], choice)
        result = compiled(launch, target)
        assert result.count(MMA[target]) > 0
        assert result.count(r"tcgen05\.cp\S*warpx4") > 0  # scales reach the MMA without registers
        assert result.count(r"cp\.async\.bulk\.tensor\.2d\.shared") > 0
        assert (result.count("setmaxnreg") > 0) == config.warp_specialize


@pytest.mark.parametrize("target", NATIVE)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("k", [4096, 4144])
def test_fused_quantize_mm(k, tokens, target):
    x, w = meta(TOKENS[tokens], k, dtype=torch.bfloat16), operand(4096, k)
    launch, _ = fused_quantize_mm.plan(x, w, None, Format(), torch.bfloat16, TARGETS[target])
    result = compiled(launch, target)
    assert result.count(MMA[target]) > 0
    assert result.count(BF16_MMA) == 0
    assert result.count(WIDE_LOAD) > 0


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("tokens", [1, 16])
def test_weight_only_mm(tokens, target):
    x, w = meta(tokens, 4096, dtype=torch.bfloat16), operand(1024, 4096)
    launches, _ = weight_only_mm.plan(x, w, None, torch.bfloat16, TARGETS[target])
    assert len(launches) == 2
    product, reduce = (compiled(launch, target) for launch in launches)
    assert (product.count(BF16_MMA) > 0) == (tokens > 1)
    assert product.count(WIDE_LOAD) > 0
    assert reduce.count(WIDE_LOAD) > 0
    assert product.count(r"\batom\.|\bred\.|_atomic_") == 0  # parts are summed in order


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx950"])
@pytest.mark.parametrize("m", [1, 33])
def test_ragged_shapes_compile(m, target):
    """Nothing aligned, tiles at their smallest: registers may spill, but there is a kernel and it fits."""
    n, k, chip = 67, 101, TARGETS[target]
    x, w, bias = meta(m, k, dtype=torch.bfloat16), operand(n, k), meta(n, dtype=torch.bfloat16)
    launches = [quantize.plan(x, layout, Format(), ScaleLayout.ROW_MAJOR, chip)[0] for layout in Layout]
    launches += weight_only_mm.plan(x, w, bias, torch.bfloat16, chip)[0]
    if chip.native:
        launches.append(scaled_mm.plan(operand(m, k), w, bias, torch.bfloat16, chip)[0])
        launches.append(fused_quantize_mm.plan(x, w, bias, Format(), torch.bfloat16, chip)[0])
    for launch in launches:
        result = compile_launch(launch, chip)
        assert result.shared_bytes <= chip.shared_bytes
        assert result.count(r"st\.global|global_store|buffer_store") > 0


TABLES = {
    "quantize": (configs.QUANTIZE, GPUS),
    "scaled_mm": (configs.SCALED_MM, NATIVE),
    "scaled_mm_tiled": (configs.SCALED_MM_TILED, TENSOR_MEMORY),
    "fused_quantize_mm": (configs.FUSED_QUANTIZE_MM, NATIVE),
    "weight_only_mm": (configs.WEIGHT_ONLY_MM, GPUS),
}


@pytest.mark.parametrize("family", TABLES)
def test_every_target_has_a_config_or_a_reason(family):
    table, served = TABLES[family]
    assert set(table) == set(GPUS)
    for name, row in table.items():
        assert isinstance(row, configs.Absent) == (name not in served)


def test_a_chip_without_a_row_is_refused():
    chip = Target(name="sm_75", device="cuda")
    with pytest.raises(TargetError, match="weight_only_mm does not run on sm_75: the table has no row"):
        weight_only_mm.plan(meta(1, 64, dtype=torch.bfloat16), operand(8, 64), None, torch.bfloat16, chip)
