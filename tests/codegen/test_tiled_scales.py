"""Tiled scales in the code of a Llama block: from casts to tensor memory, through forward and backward."""

from __future__ import annotations

import contextvars
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton
from generating import assert_clean, generate, product_of
from helpers.written import Written
from triton.runtime import _allocation

from mxcompile.formats.scale_tiles import TILE_ROWS
from mxcompile.lowering.choices import configs
from mxcompile.lowering.choices.configs import tiled_configs
from mxcompile.lowering.kernels import scratch
from mxcompile.lowering.templates import casts, vendor

COPY = "tcgen05.cp.cta_group::1.warpx4.32x128b"


@pytest.mark.parametrize("columns", [32, 64, 128, 256])
def test_programs_of_a_cast_cover_the_padding_of_tiled_scales(columns: int):
    """A product reads the scales there too: if they were not written, NaN times 0 would be NaN."""
    meta = {"PADDING": TILE_ROWS, "ENTRY": 0, "BLOCK_M": 32, "BLOCK_N": columns}
    down, across, _ = casts.TEMPLATE.grid(150, 272, meta)
    assert down * 32 >= 256
    assert across * columns >= 384


def _products(result):
    return [launch for launch in result.launches if launch.gemms and launch.generated]


def test_scales_reach_tensor_memory_without_registers(generated):
    """Of every product, and its operands come through the tensor memory accelerator."""
    result = generated("sm_100", True)
    assert len(_products(result)) == 3 * 7
    for launch in _products(result):
        ptx = result.kernel(launch).binary.text["ptx"]
        copies = len(re.findall(re.escape(COPY), ptx))
        assert copies >= 2, (launch.kernel, copies)
        assert "cp.async.bulk.tensor.2d" in ptx
        assert not re.search(r"ld\.global\S*\.b8|ld\.global\S*\.u8", ptx)
    forms = {gemm.kernel.split()[0] for gemm in result.report.gemms if gemm.precision == "mxfp8"}
    assert forms == {"mx_scaled_mm_tiled"}


def test_scratch_memory_is_provided_where_the_code_runs(generated):
    """In front of every launch that asks for some, whatever thread or context it is called from."""
    result = generated("sm_100", True)
    for phase, count in (("forward", 7), ("backward", 14)):
        kernels = [kernel for kernel in result.kernels if kernel.phase == phase]
        asking = {kernel.name for kernel in kernels if "tiled_descriptor" in kernel.source}
        lines = [line.strip() for line in result.wrappers[phase].splitlines()]
        launches = [at for at, line in enumerate(lines) if line.partition(".run(")[0] in asking]
        assert len(launches) == count
        assert all("provide_scratch()" in lines[at - 2 : at] for at in launches)


def test_scratch_memory_in_any_thread_and_context(monkeypatch):
    """As Triton's driver asks for it; an allocator of the user's stays."""
    monkeypatch.setattr(scratch, "_allocate", lambda size, *_: torch.empty(size, dtype=torch.int8))

    def allocated_bytes():
        return _allocation._allocator.get()(640, 128, None).numel()

    def provided():
        scratch.provide()
        return allocated_bytes()

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(RuntimeError, match="no allocator was set"):
            pool.submit(allocated_bytes).result()
        assert pool.submit(provided).result() == 640
    assert contextvars.Context().run(provided) == 640

    def users():
        triton.set_allocator(lambda *_: torch.empty(7))
        return provided()

    assert contextvars.Context().run(users) == 7


def test_casts_write_whole_tiles(generated):
    """A copy's scale is a vector of whole tiles, in what forward makes, keeps for backward and uses there."""
    result = generated("sm_100", True)
    for phase in ("forward", "backward"):
        allocated = r"= empty_strided_cuda\((\(.*?\)), \(.*?\), torch\.uint8\)"
        bytes_ = re.findall(allocated, result.wrappers[phase])
        shapes = {tuple(map(int, re.findall(r"\d+", shape))) for shape in bytes_}
        assert shapes
        assert all(len(shape) == 1 and shape[0] % 512 == 0 for shape in shapes), shapes
    forward = result.wrappers["forward"]
    saved = {*re.findall(r"\w+", forward.rpartition("return (")[2])}
    buffers = {*re.findall(r"(\w+) = empty_strided_cuda\(\(\d+, \), \(1, \), torch\.uint8\)", forward)}
    assert len(saved & buffers) == 3, "x of QKV, of gate and up, of down; attention keeps its result"


def test_nothing_lies_between_a_saved_cast_and_wgrad(generated):
    """Every kernel of backward computes something: none only moves bytes."""
    backward = generated("sm_100", True).phase("backward")
    assert [launch.kernel for launch in backward if launch.generated and not launch.operators] == []
    assert sum(bool(launch.gemms) and launch.generated for launch in backward) == 2 * 7


@pytest.mark.parametrize("target", ["sm_103"])
def test_the_other_chip_of_the_family(target):
    result = generate(torch.nn.Linear(512, 1024), (256, 512), target=target, training=True)
    assert len(_products(result)) == 2
    assert all(COPY in result.kernel(launch).binary.text["ptx"] for launch in _products(result))
    assert not result.spilling


@pytest.mark.parametrize(("k", "tokens"), [(520, 4096), (100, 300)])
def test_sizes_that_the_accelerator_cannot_read_keep_tiled_scales(k, tokens):
    """The pointer form loads whole tiles too, by 16 bytes a thread or as many as there are."""
    result = generate(torch.nn.Linear(k, 1000), (tokens, k))
    binary = product_of(result)[1].binary
    assert COPY in binary.text["ptx"]
    assert "cp.async.bulk.tensor" not in binary.text["ptx"]
    assert binary.spill_bytes == 0
    (gemm,) = result.report.gemms
    assert gemm.kernel == "mx_scaled_mm 128x128x128 (tcgen05.mma block_scale)"


def test_large_products_take_wide_tiles(monkeypatch):
    """From as many tiles as there are processors on, where the library's is not there."""
    monkeypatch.setattr(vendor, "fits_fp8", lambda *_: False)
    monkeypatch.setattr(configs, "tiled_configs", lambda target: tiled_configs(target)[:2])
    result = generate(torch.nn.Linear(4096, 14336, bias=False, device="meta"), (4096, 4096))
    (gemm,) = result.report.gemms
    assert gemm.kernel == "mx_scaled_mm_tiled 128x256x128 (tcgen05.mma block_scale)"
    assert product_of(result)[1].binary.tmem_columns <= 512
    assert_clean(result)


def _strides(ttgir, values):
    """Those of `values` that tensors are multiplied by, each with the type it is done in."""
    constants = dict(re.findall(r"(%\S+) = arith\.constant .*dense<(\d+)>", ttgir))
    products = re.findall(r"arith\.muli %\S+, (%\S+) : tensor<\S+x(i\d+)", ttgir)
    return {(constants[by], kind) for by, kind in products if constants.get(by) in values}


@pytest.mark.parametrize(
    ("x", "weight", "form"),
    [
        ((20000, 64), (131072, 64), "mx_scaled_mm_tiled"),
        ((20000, 72), (131072, 72), "mx_scaled_mm"),
        ((2, 20000, 72), (2, 65536, 72), "mx_scaled_bmm"),
    ],
)
def test_results_of_more_than_2_31_elements(monkeypatch, x, weight, form):
    """In all forms: the accelerator's coordinates stay 32 bits wide, offsets of the result have 64.

    So have those of a residual that is read along the other side.
    """
    monkeypatch.setattr(vendor, "fits_fp8", lambda *_: False)
    m, n = x[-2], weight[-2]
    model = Written(
        lambda model, x, residual: torch.matmul(x, model.weight.mT) + residual.mT,
        weight=torch.nn.Parameter(torch.empty(weight, device="meta")),
    )
    result = generate(model, x, (*x[:-2], n, m))
    (gemm,) = result.report.gemms
    assert gemm.kernel.split()[0] == form
    assert result.problems == ()
    _, kernel = product_of(result)
    assert "INDEX_DTYPE : tl.constexpr = tl.int64" in kernel.source
    strides = _strides(kernel.binary.text["ttgir"], {str(m), str(n)})
    assert strides >= {(str(m), "i64"), (str(n), "i64")}
    assert (str(m), "i32") not in strides  # n may be: small operands have offsets of 32 bits
    assert kernel.binary.spill_bytes == 0
