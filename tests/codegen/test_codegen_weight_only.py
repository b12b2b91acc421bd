"""Code for decoding with stored MXFP8 weights on GPUs without an MX GEMM: no weight is ever dequantized."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from fake_timing import fastest
from generating import assert_clean
from helpers.paces import mostly_slow
from helpers.stored_weights import with_stored_weights
from llama_block import FFN, KV_HEADS, WIDTH, Block
from llama_block import HEADS as QUERY_HEADS

from mxcompile.offline import CodegenResult, codegen

pytestmark = pytest.mark.usefixtures("in_this_process")

KV = WIDTH * KV_HEADS // QUERY_HEADS
SIZES = {
    "attention.q": (WIDTH, WIDTH),
    "attention.k": (KV, WIDTH),
    "attention.v": (KV, WIDTH),
    "attention.o": (WIDTH, WIDTH),
    "ffn.gate": (FFN, WIDTH),
    "ffn.up": (FFN, WIDTH),
    "ffn.down": (WIDTH, FFN),
}
DECODE = mostly_slow(
    [("sm_90", 1), ("sm_90", 8), ("sm_80", 8), ("sm_89", 1), ("gfx942", 8)],
    ("sm_90", 1),
    ("sm_90", 8),
    rows=True,
)
MMA = {"sm_80": "mma.sync", "sm_90": "wgmma", "gfx942": "v_mfma"}


@functools.cache
def generate(target: str, tokens: int) -> CodegenResult:
    with torch.device("meta"):
        model = with_stored_weights(Block().to(torch.bfloat16))
        x = torch.empty(1, tokens, WIDTH, dtype=torch.bfloat16)
    return codegen(model, x, target=target, training=False)


def products(result: CodegenResult):
    """The launch of every layer's product, by the layer's name."""
    launches = [(launch.gemms, launch) for launch in result.launches if "attention" not in launch.kernel]
    return {gemm.removesuffix(" fprop"): launch for gemms, launch in launches for gemm in gemms}


@pytest.mark.parametrize(("target", "tokens"), DECODE)
def test_every_chosen_gemm_reads_its_weight_as_stored(target, tokens):
    result = generate(target, tokens)
    kernels = {gemm.name: gemm.kernel for gemm in result.report.gemms if gemm.precision == "mxfp8"}
    assert kernels.keys() == SIZES.keys()
    form = "gemv 1x8x512" if tokens == 1 else "dot 16x64x128"
    assert all(kernel.startswith(f"mx_weight_only_mm {form}") for kernel in kernels.values()), kernels
    launches = products(result)
    assert launches.keys() == SIZES.keys()
    for name, launch in launches.items():
        assert launch.generated
        assert launched(result, name) == kernels[name]
        instructions = result.kernel(launch).binary.mma
        assert (instructions == ()) == (tokens == 1), (name, instructions)
        assert all(instruction.startswith(MMA[target]) for instruction in instructions)


@pytest.mark.parametrize(("target", "tokens"), DECODE)
def test_no_dequantized_weight_is_stored(target, tokens):
    """What a product moves is its weight in FP8, a byte a block, and activations, which are small here."""
    result = generate(target, tokens)
    assert not any("mx.decode.default" in launch.operators for launch in result.launches)
    for name, launch in products(result).items():
        n, k = SIZES[name]
        weight = n * k * 33 // 32
        split = result_parts(result, name)
        # x; then the parts in FP32, or the result and at most two tensors of its shape that follow it
        others = 2 * tokens * k + (4 * split if split > 1 else 3 * 2) * tokens * n
        assert weight < launch.num_bytes <= weight + others, name


def launched(result: CodegenResult, name: str) -> str:
    """The kernel of a layer as its record should name it, by the constants in its source."""
    source = result.kernel(products(result)[name]).source
    constants = dict(re.findall(r"(\w+) : tl\.constexpr = (\w+)", source))
    form = "dot" if constants["ON_TENSOR_CORES"] == "True" else "gemv"
    tile = "x".join(constants[f"BLOCK_{side}"] for side in "MNK")
    parts = f" split {constants['PARTS']}" if constants["PARTS"] != "1" else ""
    return f"mx_weight_only_mm {form} {tile}{parts}"


@pytest.mark.parametrize(("tokens", "columns"), mostly_slow([(1, "16"), (8, "32")], (1, "16"), rows=True))
def test_record_names_the_kernel_that_autotuning_chose(tokens, columns):
    with fastest(lambda name, constants: constants.get("BLOCK_N") == columns) as timed:
        result = generate.__wrapped__("sm_90", tokens)
    assert len([name for name in timed if "mx_weight_only_mm" in name]) >= 3
    for gemm in result.report.gemms:
        if gemm.precision == "mxfp8":
            assert gemm.kernel == launched(result, gemm.name)
            assert f"x{columns}x" in gemm.kernel


def result_parts(result: CodegenResult, name: str) -> int:
    """Into how many parts the record says K is split."""
    (kernel,) = (gemm.kernel for gemm in result.report.gemms if gemm.name == name)
    return int(kernel.partition(" split ")[2] or 1)


@pytest.mark.parametrize(("target", "tokens"), DECODE)
def test_weight_only_kernels_spill_no_registers(target, tokens):
    result = generate(target, tokens)
    assert_clean(result)
    for launch in products(result).values():
        assert result.kernel(launch).binary.registers > 0, f"{launch.kernel} does not compile"


def test_epilogues_are_fused_into_weight_only_products_of_single_tokens():
    """One token: K is whole, so that sums are computed where the product is, and the gate in its cast."""
    launches = products(generate("sm_90", 1))
    assert "aten.add.Tensor" in launches["ffn.down"].operators
    generated = [launch for launch in generate("sm_90", 1).launches if launch.generated]
    (gate,) = [launch for launch in generated if "aten.exp.default" in launch.operators]
    assert "mx.cast.default" in gate.operators
    assert not [launch for launch in generated if set(launch.operators) == {"aten.add.Tensor"}]


def test_parts_are_summed_where_the_result_is_read():
    """Eight tokens: K is split; no kernel does nothing but sum."""
    result = generate("sm_90", 8)
    assert result_parts(result, "ffn.down") > 1
    for launch in result.launches:
        if "mx.weight_only_mm.default" in launch.operators and not launch.gemms:
            assert len(launch.operators) > 1, launch


def test_many_rows_are_left_to_the_vendors_gemm():
    result = generate("sm_90", 64)
    chosen = [gemm for gemm in result.report.gemms if gemm.precision == "mxfp8"]
    assert {gemm.kernel for gemm in chosen} == {"aten.mm (bfloat16, dequantized)"}
    casts = [launch for launch in result.launches if "mx.decode.default" in launch.operators]
    assert len(casts) == len(SIZES), "each weight is dequantized from its stored copy, once"


def test_native_targets_multiply_natively():
    result = generate("sm_100", 8)
    kernels = {gemm.kernel for gemm in result.report.gemms if gemm.precision == "mxfp8"}
    assert all("block_scale" in kernel for kernel in kernels), kernels
