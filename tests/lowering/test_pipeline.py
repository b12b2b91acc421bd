"""The list of lowering passes: which apply, what is missing here, and what is checked after each."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from helpers.casts import multiplies_scaled
from helpers.policies import every
from helpers.stored_weights import with_stored_weights
from torch import fx

from mxcompile.errors import VerificationError
from mxcompile.lowering import optional
from mxcompile.lowering.choices import packing
from mxcompile.lowering.graph import pipeline
from mxcompile.lowering.graph.lowering_pass import LoweringPass
from mxcompile.lowering.targets import TARGETS
from mxcompile.offline import codegen

CPU = torch.device("cpu")

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch, mxcompile
from mxcompile.lowering.choices import packing
from mxcompile.lowering.graph import pipeline
from mxcompile.lowering.targets import TARGETS
print(pipeline.obstacles(TARGETS["cpu"]))
print(len(pipeline.obstacles(TARGETS["sm_100"])), pipeline.obstacles(TARGETS["sm_100"])[0])
graph = torch.fx.Graph()
graph.output(graph.placeholder("x"))
pipeline.run(graph, TARGETS["cpu"], torch.device("cpu"))
pipeline.run(graph, TARGETS["sm_100"], torch.device("cpu"))
"""


def test_without_triton_templates_are_missing_and_cpus_need_none():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    on_cpu, on_gpu = done.stdout.splitlines()
    assert on_cpu == "[]"
    assert "triton" in on_gpu


def test_an_error_in_a_template_of_our_own_is_raised(monkeypatch):
    """It is no reason to do without the template: nobody would see the bug."""
    module = "templates.fused_quantize_mm"
    monkeypatch.setitem(sys.modules, f"mxcompile.lowering.{module}", None)
    with pytest.raises(ImportError, match="fused_quantize_mm"):
        optional._missing.__wrapped__(module)


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("missing", "target", "expected"),
    [
        ("templates.fused_quantize_mm", "sm_100", "mx_scaled_mm"),
        ("templates.casts", "sm_100", "aten.addmm (bfloat16, dequantized); {reason}"),
        ("templates.weight_only", "sm_90", "aten.addmm (bfloat16, dequantized); {reason}"),
    ],
)
def test_a_missing_template_turns_off_its_pass_alone_with_a_reason(monkeypatch, missing, target, expected):
    reason, others = f"no {missing} with torch 1.0: too old", optional._missing
    monkeypatch.setattr(optional, "_missing", lambda module: reason if module == missing else others(module))
    model = torch.nn.Sequential(torch.nn.Linear(256, 256, device="meta", dtype=torch.bfloat16))
    if "weight_only" in missing:
        with_stored_weights(model)
    x = torch.empty(16, 256, dtype=torch.bfloat16)
    result = codegen(model, x, target=target, training=False, policy=every("mxfp8"))
    (gemm,) = result.report.gemms
    assert gemm.precision == "mxfp8"
    assert gemm.kernel.startswith(expected.format(reason=reason))
    assert any(map(multiplies_scaled, result.kernels)) == ("reason" not in expected)


class Breaks(LoweringPass):
    def apply(self, graph: fx.Graph) -> None:
        first, second, _ = graph.nodes
        second.append(first)


def test_an_invalid_graph_names_the_pass_that_left_it(monkeypatch):
    monkeypatch.setattr(pipeline, "LOWERING", (Breaks,))
    graph = fx.Graph()
    graph.output(graph.call_function(torch.neg, (graph.placeholder("x"),)))
    with pytest.raises(VerificationError, match="after test_pipeline: "):
        pipeline.run(graph, TARGETS["cpu"], CPU)


EVERYWHERE = ("cached_attention", "weight_only", "expand", "split_casts", "name_kernels")
LIBRARY = "vendor_fp8", "packed"
NATIVE = {"promote_to_mx", "native", "fuse", "merge_casts"}


@pytest.mark.parametrize(
    ("target", "joint", "others"),
    [
        ("cpu_bf16", [], {"integer"}),
        ("cpu_fp32", [], {"integer", "promote"}),
        ("sm_80", [], {"merge_casts", "merge_sibling_casts"}),
        ("gfx950", [*LIBRARY], NATIVE | {*LIBRARY}),
        ("sm_100", ["tile_scales", *LIBRARY], NATIVE | {"merge_sibling_casts", *LIBRARY}),
    ],
)
def test_pipeline_runs_the_passes_of_a_target(monkeypatch, target: str, joint: list[str], others: set[str]):
    monkeypatch.setattr(packing, "converts", lambda chip: chip.name.startswith("sm_1"))
    chip = TARGETS[target]
    names, before = (
        [step.name for step in passes if step(target=chip, device="cpu").applies]
        for passes in (pipeline.LOWERING, pipeline.JOINT_LOWERING)
    )
    assert before == joint
    assert set(names) == others.union(EVERYWHERE)
    assert [name for name in names if name in EVERYWHERE] == list(EVERYWHERE)
