"""What the passes make of a graph, read off the printed IR."""

from __future__ import annotations

import re

import pytest
import torch
from helpers.blocks import WIDTH, Attention, SwiGLU, block, features
from helpers.eager_backend import EagerBackend
from helpers.made import Made
from helpers.one_linear import policy
from helpers.reports import EVERYTHING
from torch import Tensor, nn
from torch.testing import FileCheck
from torch.utils.checkpoint import checkpoint

import mxcompile
from mxcompile.versions import newer


def step(model: nn.Module, x: Tensor, backend: EagerBackend, autocast: bool = False) -> str:
    """IR of the joint graph of one training step."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = torch.compile(model, backend=backend, fullgraph=True)(x)
    output.float().square().mean().backward()
    (ir,) = backend.ir
    return ir


def kept(backend: EagerBackend) -> set[tuple[str, tuple[int, ...]]]:
    """Dtypes and shapes of what forward keeps for backward, without inputs."""
    return {(str(v.dtype).removeprefix("torch."), tuple(v.shape)) for v in forward_outputs(backend)}


def forward_outputs(backend: EagerBackend) -> list[torch.Tensor]:
    """Fake values of what forward keeps for backward, without inputs."""
    (output,) = backend.graphs[0].graph.find_nodes(op="output")
    return [n.meta["val"] for n in output.args[0][1:] if n.op != "placeholder"]


def test_q_k_and_v_share_the_casts_of_their_input():
    ir = step(Attention(), features(2, 20, WIDTH), EagerBackend())
    reads = re.findall(r"mx\.cast\.default\((%\w+), \[[\w ]+ @(-\d)", ir)
    assert len(reads) == len(set(reads)), "a cast is made twice"
    # forward: x, y and four weights rowwise. backward: x, y columnwise, four dy in both layouts but for
    # the rows of dq, dk and dv (x needs no gradient), the output's weight columnwise
    assert len(reads) == 6 + 2 + 4 + 1 + 1


def test_bf16_policy_leaves_the_graph_alone():
    assert "mx." not in step(block(), features(2, 9, WIDTH), EagerBackend(policy="bf16"))
    (report,) = mxcompile.reports()
    assert {gemm.precision for gemm in report.gemms} == {"bf16"}


def test_gemms_are_decided_one_by_one():
    only = policy({"fprop": "mxfp8", "dgrad": "bf16", "wgrad": "bf16"})
    ir = step(nn.Linear(64, 48), features(20, 64).requires_grad_(), EagerBackend(policy=only))
    assert (ir.count("mx.matmul"), ir.count("aten.mm")) == (1, 2)
    FileCheck().check("fprop mxfp8").check_same("x=e4m3 1x32 rceil").run(ir)


def test_weights_are_cast_in_backward_not_saved():
    backend = EagerBackend()
    step(SwiGLU(), features(2, 20, WIDTH).requires_grad_(), backend)
    weights = {(96, WIDTH), (WIDTH, 96)}
    fp8 = {shape for dtype, shape in kept(backend) if dtype == "float8_e4m3fn"}
    assert fp8 == {(40, WIDTH), (40, 96)}
    cast = [n for n in backend.graphs[1].graph.nodes if str(n.target) == "mx.cast.default"]
    assert {tuple(n.args[0].meta["val"].shape) for n in cast} >= weights


@pytest.mark.parametrize("saved", ["columnwise", "transcode", "bf16"])
def test_input_of_a_layer_is_saved_once_in_the_form_of_the_policy(saved: str):
    """The input of a layer that nothing else in backward needs: one copy, in the form asked for."""

    class Doubled(Made, a=(64, 48)):
        def forward(self, x: Tensor) -> Tensor:
            return self.a(torch.cumsum(x, 0))  # not recomputed in backward, and not needed there

    backend = EagerBackend(policy=policy({"precision": "mxfp8", "saved": saved}))
    step(Doubled(), features(96, 64), backend)
    assert (
        kept(backend)
        == {
            "columnwise": {("float8_e4m3fn", (96, 64)), ("uint8", (3, 64))},
            "transcode": {("float8_e4m3fn", (96, 64)), ("uint8", (96, 2))},
            "bf16": {("float32", (96, 64))},
        }[saved]
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_transcoding_is_of_the_input_alone(bias: bool, autocast: bool):
    """Not of the gradient; under autocast each GEMM reads the FP32 input through a view of its own."""
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 48, bias=bias))
    backend = EagerBackend(policy=policy({"precision": "mxfp8", "saved": "transcode"}))
    ir = step(model, features(2, 48, 64).requires_grad_(), backend, autocast=autocast)
    ((copy, shape),) = re.findall(r"%(\w+): float32\[(\d+, \d+)\] = mx\.decode", ir)
    assert shape == "96, 64"
    assert len(re.findall(rf"mx\.cast\.default\(%{copy}, \[[\w ]+ @-2", ir)) == 1
    assert kept(backend) >= {("float8_e4m3fn", (96, 64)), ("uint8", (96, 2))}
    assert ("uint8", (3, 64)) not in kept(backend)


def test_master_weights_are_quantized_as_they_are_stored():
    """Under autocast the cast of an FP32 weight to BF16 is undone; an activation's own rounding is not."""
    ir = step(SwiGLU(), features(2, 20, WIDTH), EagerBackend(), autocast=True)
    sources = dict(re.findall(r"^%(\w+): (\w+)\[", ir, re.MULTILINE))
    read = [sources[name] for name in re.findall(r"mx\.cast\.default\(%(\w+), \[[\w ]+ @-1", ir)]
    # x and three weights from FP32; silu(a)·b, and the gradients, from BF16
    assert (read.count("float32"), set(read)) == (4, {"float32", "bfloat16"})


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_the_rounding_an_operator_ends_with_is_not_undone(norm):
    """A norm computes in FP32 inside; what the model has of it is its BF16 result."""
    backend = EagerBackend(policy=EVERYTHING)
    model = nn.Sequential(norm(64), nn.Linear(64, 96)).bfloat16()
    ir = step(model, features(20, 64).bfloat16().requires_grad_(), backend)
    dtypes = dict(re.findall(r"^%(\w+): (\w+)\[", ir, re.MULTILINE))
    assert {dtypes[name] for name in re.findall(r"mx\.cast\.default\(%(\w+),", ir)} == {"bfloat16"}


@pytest.mark.skipif(not newer("torch", "2.11"), reason="Inductor of torch 2.11 has no outer products")
def test_products_with_a_contraction_of_one_go_back_to_multiplication():
    class Rotary(Made, a=lambda: nn.Buffer(torch.rand(8))):
        def forward(self, x: Tensor) -> Tensor:
            return x + (self.a[None, :, None] @ torch.arange(x.shape[0], dtype=torch.float32)[None, None]).mT

    ir = step(nn.Sequential(nn.Linear(8, 8), Rotary()), features(5, 8), EagerBackend())
    FileCheck().check("# 1 other fprop bf16 (role other)").run(ir)
    assert "aten.bmm" not in ir
    (report,) = mxcompile.reports()
    assert [(g.name, g.kernel) for g in report.gemms if g.k == 1] == [("1", "aten.mul")]


def test_one_token_is_quantized_like_many():
    step(nn.Linear(64, 48), features(1, 64).requires_grad_(), EagerBackend(policy=EVERYTHING))
    (report,) = mxcompile.reports()
    assert [(g.gemm, g.m, g.n, g.k, g.precision) for g in report.gemms] == [
        ("fprop", 1, 48, 64, "mxfp8"),
        ("dgrad", 1, 64, 48, "mxfp8"),
        ("wgrad", 48, 64, 1, "mxfp8"),
    ]


def test_checkpointed_regions_recompute_their_casts():
    """What forward keeps is the same as in BF16: the region's input."""

    class Region(Made, a=SwiGLU):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.a, x.sin(), use_reentrant=False)

    values = []
    for chosen in ("nvidia", "bf16"):
        torch._dynamo.reset()
        backend = EagerBackend(policy=chosen)
        assert ("mx.matmul" in step(Region(), features(2, 20, WIDTH), backend)) == (chosen == "nvidia")
        values.append([(v.dtype, v.shape) for v in forward_outputs(backend)])
    assert values[0] == values[1]
