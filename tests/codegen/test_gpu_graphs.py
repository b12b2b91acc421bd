"""The GPU benchmarks time what graphs run, made here for chips that are not; their rows, of made-up times."""

from __future__ import annotations

import pytest
import torch
from helpers.casts import scaled_mm
from helpers.needs import SPECIALIZED_WARPS
from helpers.paces import mostly_slow
from helpers.rendered import rendered

from mxcompile.lowering.choices import packing
from mxcompile.lowering.targets import TARGETS
from mxcompile.offline import Rates, Work

SM_90, SM_100 = TARGETS["sm_90"], TARGETS["sm_100"]
MX = ["rows", "columns", "both", "norm, both", "SwiGLU, both", "SwiGLU's gradients, both"]
VALUES = ["value in rows", "value in columns", "both values", "SwiGLU's gradients, both values"]
FP8 = ["FP8, a known scale", "norm, FP8, a known scale", "FP8, channels", "FP8, blocks", "norm, FP8, blocks"]


@pytest.fixture
def module(benchmark, monkeypatch):
    """A benchmark's module by its name, its tensors on the CPU."""
    for name in ("gpu_common", "gpu_graphs"):
        monkeypatch.setattr(benchmark(name), "DEVICE", "cpu")
    return benchmark


@pytest.fixture
def casts(module):
    """By name, of 256 rows, those of a target."""
    return lambda target: {graph.name: graph for graph in module("gpu_graphs").casts(256, 512, target)}


def test_a_chip_has_the_casts_that_its_models_run(casts):
    native, emulated = list(casts(SM_100)), list(casts(SM_90))
    assert native[: len(MX)] == MX
    assert set(VALUES) <= set(emulated)
    assert not set(MX) & set(emulated)
    assert set(FP8) <= set(emulated)
    assert not any("blocks" in name for name in native), "the vendor's GEMM has no such scales there"
    assert not any("FP8" in name for name in casts(TARGETS["sm_80"]))


@pytest.mark.parametrize("name", mostly_slow(MX, "SwiGLU's gradients, both"))
def test_a_cast_is_the_template_with_its_producer(casts, name):
    """One kernel, beside a norm's statistic, and the model has an estimate for it."""
    converts = packing.converts(SM_100)
    if "gradients" in name and not converts:
        pytest.skip("this Triton's assembler does not convert pairs of BF16: the gradients have two kernels")
    result = casts(SM_100)[name].code("sm_100")
    *others, cast = result.launches
    assert len(others) == (name == "norm, both")
    assert f"{'packed' if converts else 'tiles'}.quantize_" in result.kernel(cast).source
    assert result.step.us >= cast.estimate.us > 0
    written = 4 if "gradients" in name else 2 if "both" in name else 1
    assert cast.num_bytes > 256 * 512 * (2 + written)


@pytest.mark.parametrize("name", mostly_slow([*VALUES, *FP8], "SwiGLU's gradients, both values"))
def test_a_cast_of_hopper_is_the_template(casts, name):
    result = casts(SM_90)[name].code("h100")
    device_functions = ("fp8_tiles.encode(", "packed.quantize_", "packed.round_")
    (cast_kernel,) = [
        kernel for kernel in result.kernels if any(call in kernel.source for call in device_functions)
    ]
    assert not cast_kernel.binary.problems
    assert result.rates.target.peak.chip == "H100"


@pytest.mark.parametrize("name", ["both", "SwiGLU's gradients, both", "FP8, channels", "value and codes"])
def test_cast_and_plain_graph_read_the_same_tensors(casts, name):
    """Both ways read the same, and what is copied has the shape of its source."""
    graph = {**casts(SM_90), **casts(SM_100)}[name]
    inputs = graph.inputs()
    results, plain = graph.compute(*inputs), graph.plain(*inputs)
    copies = [copied for copied in results if copied.ndim == 2 and copied.numel() == 256 * 512]
    assert len(copies) == 2 * len(plain)
    for source in plain:
        assert source.shape == (256, 512)
        assert source.dtype is torch.bfloat16


@pytest.mark.parametrize("layout", ["fprop", "dgrad", "wgrad"])
def test_benchmark_products_are_the_template_in_every_layout(module, layout):
    """In every layout; the operands are those of one product however they are stored."""
    gemms, graphs, common = map(module, ("gpu_gemms", "gpu_graphs", "gpu_common"))
    (x,), (a,) = common.quantized(256, 512, 1, SM_100.scale_layout)
    _, (b,) = common.quantized(128, 512, 1, SM_100.scale_layout)
    operands = (*gemms._stored(a, layout, 0), *gemms._turned(gemms._stored(b, layout, 1)))
    source = rendered(lambda *args: [graphs.scaled_mm(*args)], operands, SM_100)
    with graphs.on_form("pointers"):
        assert "A_K_MAJOR" not in rendered(lambda *args: [graphs.scaled_mm(*args)], operands, SM_100)
    k_major = layout != "wgrad", layout == "fprop"
    assert "tma_tile.tile_product(" in source
    assert f"A_K_MAJOR : tl.constexpr = {k_major[0]}" in source
    assert f"B_K_MAJOR : tl.constexpr = {k_major[1]}" in source
    common.check_product(scaled_mm(*operands, None, torch.float32), common.values(a), common.values(b), "")
    assert (x - common.values(a)).norm() < 0.05 * x.norm()


@SPECIALIZED_WARPS
def test_products_of_specialized_warps_are_the_template(module):
    gemms, graphs, common = map(module, ("gpu_gemms", "gpu_graphs", "gpu_common"))
    (_, (a,)), (_, (b,)) = (common.quantized(rows, 512, 1, SM_100.scale_layout) for rows in (256, 128))
    with graphs.on_form("specialized"):
        source = rendered(lambda *args: [graphs.scaled_mm(*args)], (*a, *gemms._turned(b)), SM_100)
    assert "WARP_SPECIALIZE : tl.constexpr = True" in source


def test_fused_and_weight_only_products_are_the_templates(module):
    graphs, common = map(module, ("gpu_graphs", "gpu_common"))
    (x,), _ = common.quantized(16, 512, 1, SM_100.scale_layout)
    _, (w,) = common.quantized(128, 512, 1, SM_100.scale_layout)
    fused = rendered(lambda *args: [graphs.quantize_mm(*args)], (x, w[0].t(), w[1]), SM_100)
    assert "tl.dot_scaled" in fused
    assert "quantize_rowwise" in fused
    _, (w,) = common.quantized(128, 512, 1, TARGETS["sm_90"].scale_layout)
    stored = rendered(lambda *args: [graphs.weight_only(*args)], (x, *w), TARGETS["sm_90"])
    assert "weight_only.sums" in stored
    assert "ON_TENSOR_CORES : tl.constexpr = True" in stored


def test_row_of_a_graph_has_both_times(module, casts, monkeypatch):
    """Of times that are made up: ratios, bandwidth and its share, the measured over the predicted."""
    kernels, common, predicted = map(module, ("gpu_kernels", "gpu_common", "gpu_predicted"))
    graph, rates = casts(SM_90)["both values"], Rates.for_target(SM_90)
    program = kernels.CastProgram(part="casts", kernel="both values", shape="256x512", graph=graph)
    work = predicted.LaunchWork(kind="cast", kernel="cast", work=Work(num_bytes=7_680_000))
    monkeypatch.setattr(kernels.CastProgram, "works", lambda *_: (work,))
    monkeypatch.setattr(type(graph), "compiled", lambda self: self.compute)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    seen = {}

    def times(runs, repeats):
        for name, calls in runs.items():
            seen[name] = [call() for call in calls]
        return {"both values": 10.0, "baseline": 7.5}

    monkeypatch.setattr(common, "graph_times", times)
    (row,) = program.measure(rates, 3)
    low, high = row.pop("predicted_range_us")
    assert low < 5.0 < high
    assert row == {
        "part": "casts", "kernel": "both values", "shape": "256x512", "time_us": 10.0, "ratio": 0.75,
        "baseline": "a copy (Inductor)", "baseline_us": 7.5, "gbs": 768, "of_peak": 0.16, "predicted_us": 5.0,
        "over_predicted": 2.0,
    }  # fmt: skip
    assert len(seen["both values"]) == len(seen["baseline"]) == 16, "copies that do not fit the cache"


def uncompiled(predicted, **about):
    """Returns a program that is neither compiled nor timed."""

    class Uncompiled(predicted.CompiledProgram):
        def measure(self, rates, repeats):
            raise AssertionError("a test times nothing")

        def code(self, target):
            raise AssertionError(f"compiled for {target}")

    return Uncompiled(**about)


def test_an_estimate_is_of_the_work_that_was_written_down(module, monkeypatch):
    """For these versions of PyTorch and Triton and this target, not for others; the newest row counts."""
    predicted = module("gpu_predicted")
    about = {"part": "casts", "kernel": "one", "shape": "1x1"}
    row = {"torch": torch.__version__, "triton": predicted.installed()[1], "target": "sm_90", **about}
    old, new, other = (
        {**row, **changes, "works": [["cast", "cast", {"num_bytes": size}]]}
        for changes, size in (({}, 1e6), ({}, 3.84e6), ({"triton": "3.0"}, 9e6))
    )
    monkeypatch.setattr(predicted.common, "read", lambda _: [old, new, other])
    predicted.written.cache_clear()
    program = uncompiled(predicted, **about)
    assert program.num_bytes(Rates.for_target(SM_90)) == 3.84e6
    assert program.expected(4.0, Rates.for_target(SM_90))["over_predicted"] == 1.0
    monkeypatch.setattr(type(program), "compiled", lambda *_: {"works": [["rest", "x", {"num_bytes": 5}]]})
    assert program.num_bytes(Rates.for_target(SM_100)) == 5, "what is not written down is compiled now"
    predicted.written.cache_clear()


def test_a_program_has_one_line_with_a_column_for_each_chip_and_pair_of_versions(module, monkeypatch):
    predicted = module("gpu_predicted")
    rows = [
        {"torch": torch_version, "triton": triton_version, "target": "sm_90", "part": "casts", "kernel": name}
        | {"shape": "1x1", "works": [["cast", "cast", {"num_bytes": size}]]}
        for name, torch_version, triton_version, size in (
            ("one", "2.13.0+cpu", "3.7.1", 3.84e6),
            ("one", "2.11.0", "3.6.0", 7.68e6),
            ("two", "2.11.0", "3.6.0", 3.84e6),
        )
    ]
    monkeypatch.setattr(predicted.common, "read", lambda _: rows)
    predicted.written.cache_clear()
    row, two = predicted.other_table()
    chips = ("H100", "H200")
    stacks = ("torch 2.11.0, Triton 3.6.0", "torch 2.13.0, Triton 3.7.1")
    assert list(row) == ["part", "what", "shape", *(f"{chip}, {stack}" for chip in chips for stack in stacks)]
    first, second = (row[f"H200, {stack}"].split()[0] for stack in stacks)
    assert (first, second) == ("5.0", "4.0"), "2 µs at 3,840 GB/s, 1 µs, and a launch of 3 µs"
    assert (two["what"], two["H200, torch 2.13.0, Triton 3.7.1"]) == ("two", "")
    predicted.written.cache_clear()


def test_a_layers_measured_time_has_its_estimate(module, monkeypatch):
    """Those of other libraries have none, as their code is not known."""
    gemms = module("gpu_gemms")
    times = {"baseline": 10.0, "mxcompile": 8.0, "mxcompile fp8": 6.0}

    def rows(target, repeats):
        yield from ({"kernel": name, "time_us": time} for name, time in times.items())

    about = {"part": "linears", "kernel": "mxfp8", "shape": "1x1"}
    program = gemms.GemmProgram(**about, rows=rows, generated=lambda _: None)
    monkeypatch.setattr(gemms.GemmProgram, "expected", lambda self, time, rates: {"predicted_us": time / 2})
    measured = program.measure(Rates.for_target(SM_90), 1)
    estimates = {row["kernel"]: row.get("predicted_us") for row in measured}
    assert estimates == {"baseline": None, "mxcompile": 4.0, "mxcompile fp8": None}


def test_failed_measurement_is_recorded_as_a_row(module):
    common, predicted = module("gpu_common"), module("gpu_predicted")
    program = uncompiled(predicted, part="casts", kernel="one", shape="1x1")

    def rows():
        yield {"kernel": "first"}
        raise RuntimeError("no such instruction\nat line 7")

    first, second = common.attempt(program, rows)
    assert first == {"kernel": "first"}
    assert second == {**program.about, "wrong": "RuntimeError: no such instruction"}


def test_rates_are_shares_of_the_peak_of_their_precision(module):
    rate = module("gpu_common").rate
    flops = 2 * 8192**3
    assert rate(1000.0, SM_100.peak, flops=flops, precision="mxfp8") == {"tflops": 1099.5, "of_peak": 0.244}
    assert rate(1000.0, SM_100.peak, flops=flops, precision="bf16")["of_peak"] == 0.489
    assert rate(1000.0, None, flops=flops, precision="bf16")["of_peak"] is None


def test_a_check_fails_where_it_should(module):
    common = module("gpu_common")
    (x,), (a,) = common.quantized(64, 128, 1, SM_100.scale_layout)
    exact = common.values(a)
    out = (exact @ exact.t()).bfloat16()
    common.check_product(out, exact, exact, "right")
    out[3, 5] *= 1.02
    with pytest.raises(common.WrongError, match=r"wrong: error is .* times"):
        common.check_product(out, exact, exact, "wrong")
    with pytest.raises(common.WrongError, match="differs"):
        common.check_bits(x, x + 1, "bits")


def test_kernels_are_joined_by_their_names(module):
    """Numbers differ from compile to compile; what a library runs has other names."""
    layer, rates = module("gpu_layer"), Rates.for_target(SM_100)
    per_us = rates["memory"] * SM_100.peak.bandwidth_gbs * 1e3
    works = [
        module("gpu_predicted").LaunchWork(kind="cast", kernel=kernel, work=Work(num_bytes=us * per_us))
        for kernel, us in (
            *((f"triton_tem_fused_cast_{n}", 7.0) for n in (3, 7)),
            ("extern_kernels.mm", 47.0),
        )
    ]
    measured = {
        "triton_tem_fused_cast_0": 30.0,
        "nvjet_tst_128x256": 60.0,
        "cutlass_80": 40.0,
        "triton_new_1": 1.0,
    }
    rows = {row["kernel"]: row for row in layer.compare("nvidia", works, measured, rates)}
    assert list(rows) == ["libraries", "triton_tem_fused_cast", "triton_new"]
    cast = rows["triton_tem_fused_cast"]
    assert (cast["time_us"], cast["predicted_us"]) == (30.0, 20.0)
    assert (cast["shape"], cast["bound_by"]) == ("nvidia", "memory")
    assert [row["over_predicted"] for row in rows.values()] == [2.0, 1.5, None]
