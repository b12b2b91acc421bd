"""Every matmul has a record, tied to its layer; the verifier catches what breaks that."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.blocks import WIDTH, Attention, Explicit, SwiGLU, block, features
from helpers.casts import quantize, scaled_mm
from helpers.eager_backend import EagerBackend
from helpers.fresh import forget
from helpers.made import Made
from helpers.policies import policy, rule
from helpers.reports import all_gemms, report_of
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import mxcompile
from mxcompile import ops
from mxcompile.errors import VerificationError
from mxcompile.graph.opsets import is_matmul_like
from mxcompile.graph.tags import set_tag, tags_of
from mxcompile.models.blocks import Blocks
from mxcompile.passes import pipeline
from mxcompile.passes.decide import obstacle
from mxcompile.passes.record import records
from mxcompile.passes.verify import verify
from mxcompile.policy import Policy


def test_three_gemms_a_layer_in_training_one_in_inference():
    model, x = block(), features(2, 9, WIDTH).requires_grad_()
    report = report_of(model, x)
    layers: dict[str, list[str]] = {}
    for gemm in report.gemms:
        if gemm.role not in ("attn_scores", "attn_values"):
            layers.setdefault(gemm.name, []).append(gemm.gemm)
    assert len(layers) == 7
    assert all(sorted(kinds) == ["dgrad", "fprop", "wgrad"] for kinds in layers.values())

    report = report_of(model, x, training=False)
    assert [gemm.gemm for gemm in report.gemms] == ["fprop"] * 9
    assert report.summary.saved_bytes is None


def test_attention_counts_both_products_fused_or_not():
    """softmax(q·kᵀ)·v is two products forward and four backward, in one operator or spelled out."""
    for model in (Attention(), Explicit()):
        report = report_of(model, features(2, 9, WIDTH))
        products = ("attn_scores", "attn_values")
        gemms = [(g.role, g.gemm) for g in report.gemms if g.role in products]
        assert sorted(gemms) == [(role, gemm) for role in products for gemm in ("dgrad", "dgrad", "fprop")]
        assert all(g.precision == "bf16" for g in report.gemms if g.role.startswith("attn_s"))


def test_flops_of_a_layer_are_its_three_products():
    report = report_of(nn.Linear(64, 48), features(20, 64).requires_grad_())
    assert [gemm.flops for gemm in report.gemms] == [2 * 20 * 48 * 64] * 3


def test_names_are_the_users_across_a_graph_break():
    attention = functools.partial(nn.MultiheadAttention, WIDTH, 4, batch_first=True)

    class Outer(Made, first=block, attn=attention):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            return x + self.attn(x, x, x, need_weights=False)[0]

    torch.compile(Outer(), backend=EagerBackend())(features(2, 9, WIDTH)).mean().backward()
    names = {g.name for g in all_gemms()}
    assert names >= {"first.0.b.a", "first.1.b.c", "attn.in_proj", "attn.out_proj"}
    assert sum(report.summary.graph_breaks for report in mxcompile.reports()) == 1


def test_blocks_with_different_decisions_are_compiled_separately():
    """A break in a loop makes Dynamo compile the blocks' frames, one for all that guard equal."""

    class Looped(Made, stack=lambda: nn.ModuleList([SwiGLU(), SwiGLU()])):
        def forward(self, x: Tensor) -> Tensor:
            for inner in self.stack:
                x = x + inner(x)
                torch._dynamo.graph_break()
            return x

    first = policy(rule("bf16", name="stack.0.*"), preset="nvidia")
    for rules, expected in ((first, "bf16"), ("nvidia", "mxfp8")):
        forget()
        torch.compile(Looped(), backend=EagerBackend(policy=rules))(features(2, WIDTH))
        (report,) = mxcompile.reports()
        precisions = {(gemm.name.split(".")[1], gemm.precision) for gemm in report.gemms}
        assert precisions == {("0", expected), ("1", "mxfp8")}
        assert report.summary.warnings == ()


def test_source_is_the_users_line():
    by_name = {gemm.name: gemm.source for gemm in report_of(block(), features(2, 9, WIDTH)).gemms}
    file, line = by_name["1.b.c"].rsplit(":", 1)
    text = Path(file).read_text(encoding="utf-8").splitlines()[int(line) - 1]
    assert "self.c(F.silu(self.a(x)) * self.b(x))" in text


def traced(function: Any, *args: Tensor) -> fx.Graph:
    return make_fx(function, tracing_mode="fake")(*args).graph


def decided_graph() -> fx.Graph:
    graph = traced(lambda x, w: x @ w, torch.randn(4, 8), torch.randn(8, 4))
    facts = {"strict": False, "inputs": (), "blocks": Blocks(), "cut": "", "planned": {}, "tapped": False}
    pipeline.run(pipeline.joint_passes(Policy(), **facts), graph)
    return graph


def matmul(graph: fx.Graph) -> fx.Node:
    return next(node for node in graph.nodes if is_matmul_like(node))


def test_a_lost_tag_is_an_error():
    graph = decided_graph()
    set_tag(matmul(graph))
    with pytest.raises(VerificationError, match="has no tag"):
        verify(graph, "test", decided=True)
    with pytest.raises(VerificationError, match="without a record"):
        records(graph)


def test_an_undecided_matmul_is_an_error():
    graph = decided_graph()
    node = matmul(graph)
    set_tag(node, replace(tags_of(node)[0], choice=None))
    with pytest.raises(VerificationError, match="is not decided"):
        verify(graph, "test", decided=True)


def test_scales_of_another_dimension_are_an_error():
    def product(x: Tensor, w: Tensor) -> Tensor:
        qx, sx = quantize(x, -2, torch.float8_e4m3fn, "rceil")
        qw, sw = quantize(w, -2, torch.float8_e4m3fn, "rceil")
        return scaled_mm(qx, sx, qw, sw, None, torch.float32)

    graph = traced(product, torch.randn(64, 96), torch.randn(96, 32))
    set_tag(next(n for n in graph.nodes if n.target is ops.matmul), *tags_of(matmul(decided_graph())))
    with pytest.raises(VerificationError, match="reads scales"):
        verify(graph, "test", decided=True)


def test_ir_is_printed_after_every_pass(capfd: pytest.CaptureFixture[str]):
    torch._logging.set_logs(modules={"mxcompile.passes": 10})
    try:
        report_of(nn.Linear(8, 8), features(2, 8))
    finally:
        torch._logging.set_logs()
    printed = capfd.readouterr().err
    for name in ("find", "classify", "decide", "quantize_gemms", "restore", "share", "save"):
        assert f"after {name}\n" in printed


@pytest.mark.parametrize(
    ("x", "alpha", "cause"),
    [
        (torch.ones(4, 64), 2.0, None),
        (torch.ones(4, 64, dtype=torch.float64), 1, "unsupported dtype float64: use FP32, BF16 or FP16"),
        (torch.ones(4, 64).to_sparse_coo(), 1, "unsupported layout sparse_coo"),
        (torch.ones(4, 64), "a", "alpha or beta is not a number"),
    ],
    ids=["taken", "float64", "sparse", "symbolic factor"],
)
def test_operands_that_no_cast_reads_have_a_reason(x: Tensor, alpha: Any, cause: str | None):
    """alpha: a number, or the name of an input."""
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in ("bias", "x", "w")]
    for node, value in zip(inputs, (torch.ones(32), x, torch.ones(64, 32)), strict=True):
        node.meta["val"] = value
    factor = graph.placeholder(alpha) if isinstance(alpha, str) else alpha
    product = graph.call_function(torch.ops.aten.addmm.default, tuple(inputs), {"alpha": factor})
    assert obstacle(product) == cause
