"""The GPU benchmarks time what graphs run, made here for chips that are not; their rows, of made-up times."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path

import pytest
import torch
from helpers.paces import mostly_slow
from helpers.rendered import rendered

from mxcompile import ops
from mxcompile.lowering.targets import TARGETS
from mxcompile.offline import Estimate, Launch
from mxcompile.offline.step import Step

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SM_100 = TARGETS["sm_100"]
NAMES = ["rowwise", "columnwise", "both", "norm, both", "swiglu, both", "swiglu's gradients"]


@pytest.fixture
def module(monkeypatch):
    """A benchmark's module by its name, its tensors on the CPU."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(importlib.import_module("gpu_common"), "DEVICE", "cpu")
    monkeypatch.setattr(importlib.import_module("gpu_graphs"), "DEVICE", "cpu")
    return importlib.import_module


@pytest.fixture
def casts(module):
    """By name, of 256 rows."""
    return {graph.name: graph for graph in module("gpu_graphs").casts(256, 512, SM_100)}


def test_all_are_there(casts):
    assert list(casts) == NAMES


@pytest.mark.parametrize("name", mostly_slow(NAMES, "swiglu's gradients"))
def test_a_cast_is_the_template_with_its_producer(casts, name):
    """One kernel, beside a norm's statistic, and the model has an estimate for it."""
    result = casts[name].predicted(SM_100)
    *others, cast = result.launches
    assert len(others) == (name == "norm, both")
    assert "packed.quantize_" in result.kernel(cast).source
    assert result.step.us >= cast.estimate.us > 0
    written = 4 if name == "swiglu's gradients" else 2 if "both" in name else 1
    assert cast.num_bytes > 256 * 512 * (2 + written)


@pytest.mark.parametrize("name", ["both", "swiglu's gradients"])
def test_what_is_compared(casts, name):
    """The sources of both ways are the same tensors."""
    inputs = casts[name].inputs()
    made = casts[name].compute(*inputs)
    plain = casts[name].plain(*inputs)
    plain = plain if isinstance(plain, tuple) else (plain,)
    assert len(made) == 4 * len(plain)
    for qdata, source in zip(made[::4], plain, strict=True):
        assert qdata.shape == source.shape
        assert source.dtype is torch.bfloat16


@pytest.mark.parametrize("layout", ["fprop", "dgrad", "wgrad"])
def test_products_are_the_template(module, layout):
    """In every layout; the operands are those of one product however they are stored."""
    gemms, graphs, common = map(module, ("gpu_gemms", "gpu_graphs", "gpu_common"))
    (x,), (a,) = common.quantized(256, 512, 1, SM_100.scale_layout)
    _, (b,) = common.quantized(128, 512, 1, SM_100.scale_layout)
    operands = (*gemms._stored(a, layout, 0), *gemms._turned(gemms._stored(b, layout, 1)))
    source = rendered(lambda *given: [graphs.scaled_mm(*given)], operands, SM_100)
    with graphs.on_form("pointers"):
        assert "A_K_MAJOR" not in rendered(lambda *given: [graphs.scaled_mm(*given)], operands, SM_100)
    with graphs.on_form("specialized"):
        specialized = rendered(lambda *given: [graphs.scaled_mm(*given)], operands, SM_100)
    assert "WARP_SPECIALIZE : tl.constexpr = True" in specialized
    k_major = layout != "wgrad", layout == "fprop"
    assert "tma_tile.tile_product(" in source
    assert f"A_K_MAJOR : tl.constexpr = {k_major[0]}" in source
    assert f"B_K_MAJOR : tl.constexpr = {k_major[1]}" in source
    common.check_product(
        ops.scaled_mm(*operands, None, torch.float32), common.values(a), common.values(b), ""
    )
    assert (x - common.values(a)).norm() < 0.05 * x.norm()


def test_fused_and_weight_only_products_are_the_templates(module):
    graphs, common = map(module, ("gpu_graphs", "gpu_common"))
    (x,), _ = common.quantized(16, 512, 1, SM_100.scale_layout)
    _, (w,) = common.quantized(128, 512, 1, SM_100.scale_layout)
    fused = rendered(lambda *given: [graphs.quantize_mm(*given)], (x, w[0].t(), w[1]), SM_100)
    assert "tl.dot_scaled" in fused
    assert "quantize_rowwise" in fused
    _, (w,) = common.quantized(128, 512, 1, TARGETS["sm_90"].scale_layout)
    stored = rendered(lambda *given: [graphs.weight_only(*given)], (x, *w), TARGETS["sm_90"])
    assert "weight_only.dot_sums" in stored


def test_a_row(module, casts, monkeypatch):
    """Of times that are made up: ratios, bandwidth and its share, the measured over the predicted."""
    kernels, common = module("gpu_kernels"), module("gpu_common")
    graph, step = casts["both"], Step(us=2.0, num_bytes=8_000_000)
    monkeypatch.setattr(type(graph), "predicted", lambda *_: type("Result", (), {"step": step}))
    monkeypatch.setattr(type(graph), "compiled", lambda self: self.compute)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    seen = {}

    def times(runs, repeats):
        for name, calls in runs.items():
            seen[name] = [call() for call in calls]
        return {"both": 4.0, "baseline": 3.0}

    monkeypatch.setattr(common, "graph_times", times)
    row = kernels.cast_row(graph, "256x512", SM_100, 3)
    assert row == {
        "part": "casts",
        "kernel": "both",
        "shape": "256x512",
        "time_us": 4.0,
        "baseline": "its source in BF16 (Inductor)",
        "baseline_us": 3.0,
        "ratio": 0.75,
        "gbs": 2000,
        "of_peak": 0.25,
        "predicted_us": 2.0,
        "over_predicted": 2.0,
    }
    assert len(seen["both"]) == len(seen["baseline"]) == 16, "copies that do not fit the cache"


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
    with pytest.raises(SystemExit, match=r"wrong: error is .* times"):
        common.check_product(out, exact, exact, "wrong")
    with pytest.raises(SystemExit, match="differs"):
        common.check_bits(x, x + 1, "bits")


def _launch(kernel, us, num_bytes):
    estimate = Estimate(memory_us=us)
    return Launch(phase="forward", kernel=kernel, generated=True, num_bytes=num_bytes, estimate=estimate)


def test_kernels_are_joined_by_their_names(module):
    """Numbers differ from compile to compile; what a library runs has other names."""
    layer = module("gpu_layer")
    launches = [
        _launch("triton_tem_fused_cast_3", 10.0, 8_000_000),
        _launch("triton_tem_fused_cast_7", 10.0, 8_000_000),
        _launch("extern_kernels.mm", 50.0, 1_000_000),
    ]
    measured = {
        "triton_tem_fused_cast_0": 30.0,
        "nvjet_tst_128x256": 60.0,
        "cutlass_80": 40.0,
        "triton_new_1": 1.0,
    }
    rows = {row["kernel"]: row for row in layer.compare("nvidia", launches, measured, SM_100)}
    assert list(rows) == ["libraries", "triton_tem_fused_cast", "triton_new"]
    cast = rows["triton_tem_fused_cast"]
    assert (cast["time_us"], cast["predicted_us"], cast["over_predicted"]) == (30.0, 20.0, 1.5)
    assert (cast["gbs"], cast["bound_by"]) == (533, "memory")
    assert rows["libraries"]["over_predicted"] == 2.0
    assert rows["triton_new"]["over_predicted"] is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
@pytest.mark.parametrize("name", ["gpu_kernels", "gpu_gemms", "gpu_layer", "gpu_rates"])
def test_without_a_gpu_nothing_is_measured(monkeypatch, capsys, module, name):
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
    assert "skipped" in capsys.readouterr().out
