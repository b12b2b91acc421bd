"""What autotuning times products on: numbers that are not all zero, groups that have rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fake_timing import fastest
from generating import generate
from helpers.written import Written
from torch import fx, nn
from torch._inductor import ir
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import Scheduler
from torch._inductor.select_algorithm import AlgorithmSelectorCache
from torch._inductor.virtualized import V

from mxcompile.lowering.inductor import winners
from mxcompile.lowering.templates import examples
from mxcompile.lowering.templates.coding import Coding
from mxcompile.offline import driver

pytestmark = pytest.mark.usefixtures("in_this_process")


def experts(model: Written, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    y = nn.functional.gelu(nn.functional.grouped_mm(x, model.up, offs=ends))
    return nn.functional.grouped_mm(y, model.down, offs=ends)


def _buffer(dtype: torch.dtype, size: list[int], stride: list[int]) -> ir.Buffer:
    return ir.Buffer(name="x", layout=ir.FixedLayout(torch.device("cpu"), dtype, size, stride))


@pytest.mark.parametrize("groups", [1, 8, 37])
def test_examples_are_as_real_ones(groups):
    codes, scale = torch.float8_e4m3fn, torch.uint8
    shapes = [
        (codes, [1000, 96], [96, 1]),
        (scale, [1000, 3], [3, 1]),
        (torch.float8_e5m2, [groups, 96, 64], [96 * 64, 1, 96]),
        (scale, [groups, 3, 64], [3 * 64, 64, 1]),
        (torch.int32, [groups], [1]),
    ]
    before = torch.get_rng_state()
    with V.set_graph_handler(GraphLowering(fx.symbolic_trace(nn.Identity()))):
        operands = [_buffer(*shape) for shape in shapes]
        make = examples.grouped(operands, 1000, Coding(precision="mxfp8", elems=("e4m3", "e5m2")))
        a, scale_a, b, _, ends = (make[at](node) for at, node in enumerate(operands))
    assert torch.equal(torch.get_rng_state(), before)
    sizes = ends.diff(prepend=torch.zeros(1, dtype=ends.dtype))
    assert ends.dtype == torch.int32
    assert (sizes > 0).all()
    assert sizes.sum() == 1000
    assert groups == 1 or sizes.unique().numel() > 1
    assert b.stride() == (96 * 64, 1, 96)
    for side in (a, b):
        assert side.float().isfinite().all()
        assert side.float().abs().max() > torch.finfo(side.dtype).max / 2
    assert scale_a.min() >= 115
    assert scale_a.max() <= 126


def test_examples_of_packed_codes_are_any_codes():
    sizes = [[256, 64], [256, 8]] * 2
    with V.set_graph_handler(GraphLowering(fx.symbolic_trace(nn.Identity()))):
        operands = [_buffer(torch.uint8, size, [size[1], 1]) for size in sizes]
        make = examples.dense(Coding(precision="nvfp4", elems=("e2m1", "e2m1")))
        a, scale_a, b, scale_b = (make[at](node) for at, node in enumerate(operands))
    for codes in (a, b):
        assert codes.unique().numel() == 256
    for scale in (scale_a, scale_b):
        assert scale.view(torch.float8_e4m3fn).float().min() >= 176


@pytest.mark.parametrize("fused_ones_timed", [True, False])
def test_autotuning_times_dense_products_on_them(monkeypatch, fused_ones_timed):
    """Also where the choice is put off until it is known what is fused behind, and what times that."""
    example_inputs: list[dict] = []
    put_off: list[bool] = []
    written: list[str] = []

    def timings(cache, name, operands, layout, examples, *others, **keywords):
        example_inputs.append(dict(examples or {}))
        return plain(cache, name, operands, layout, examples, *others, **keywords)

    def fused(_, module, device):
        written.append(Path(module.__file__).read_text())
        return 1.0, ""

    def select(*arguments, **keywords):
        out = selected(*arguments, **keywords)
        chosen = out[0] if isinstance(out, tuple) else out
        put_off.append(isinstance(chosen.data.data, ir.MultiTemplateBuffer))
        return out

    selected = winners.autotune_select_algorithm
    layer = nn.Linear(512, 2048)
    with fastest(lambda *_: True):
        plain = AlgorithmSelectorCache.do_autotuning
        monkeypatch.setattr(AlgorithmSelectorCache, "do_autotuning", timings)
        monkeypatch.setattr(Scheduler, "benchmark_codegened_module", fused)
        monkeypatch.setattr(winners, "autotune_select_algorithm", select)
        monkeypatch.setitem(driver._CONFIG, winners.BENCHMARKED, fused_ones_timed)
        generate(nn.Sequential(layer, nn.GELU()) if fused_ones_timed else layer, (256, 512))
    assert put_off == [fused_ones_timed]
    assert [set(example) for example in example_inputs] == [{0, 1, 2, 3}]
    for source in written:
        assert source.count("dtype=torch.uint8).random_(115, 127)") == 2
        assert source.count("dtype=torch.uint8)") == 2
    assert bool(written) == fused_ones_timed


@pytest.mark.slow
def test_autotuning_times_experts_on_them(monkeypatch):
    """Every product of experts, forward and backward."""
    example_sizes: dict[str, list[set[int]]] = {}
    plain = winners.autotune_select_algorithm

    def select(name, choices, operands, layout, **keywords):
        example_sizes.setdefault(name, []).append({*(keywords["input_gen_fns"] or {})})
        return plain(name, choices, operands, layout, **keywords)

    monkeypatch.setattr(winners, "autotune_select_algorithm", select)
    up, down = (nn.Parameter(torch.empty(shape)) for shape in ((4, 128, 256), (4, 256, 128)))
    ends = torch.zeros(4, dtype=torch.int32, device="meta")
    with fastest(lambda *_: True):
        generate(Written(experts, up=up, down=down), (256, 128), ends, training=True)
    for name in ("mx_scaled_grouped_mm", "mx_scaled_grouped_mm_k_tiled"):
        assert example_sizes[name] == [{0, 1, 2, 3, 4}] * len(example_sizes[name])
