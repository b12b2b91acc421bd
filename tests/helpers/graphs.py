"""Graphs of functions of tensors, as passes find them, and the same after some lowering passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from mxcompile import ops
from mxcompile.graph import dead
from mxcompile.graph.tags import GemmTag, Kind, set_tag
from mxcompile.lowering.graph.lowering_pass import LoweringPass
from mxcompile.lowering.targets import TARGETS, Target
from mxcompile.policy import Gemm

TAG = GemmTag(
    layer="l", name="l", module="Linear", source="", gemm=Gemm.FPROP, kind=Kind.LINEAR, tensors=("x", "w")
)


def traced(function: Callable[..., Any], *inputs: Tensor, mode: str = "fake") -> fx.GraphModule:
    """The graph of `function`; each of its mx products is that of a layer."""
    module = make_fx(lambda *arguments: function(*arguments), tracing_mode=mode)(*inputs)
    for node in module.graph.nodes:
        if node.target in (ops.matmul, ops.grouped_matmul):
            set_tag(node, TAG)
    return module


def lowered(
    steps: Sequence[type[LoweringPass]], target: str | Target, module: fx.GraphModule
) -> tuple[fx.GraphModule, list[str]]:
    """`module` after `steps` for a target, on tensors of the CPU, and the reasons that they give."""
    chip = TARGETS[target] if isinstance(target, str) else target
    reasons: dict[fx.Node, str] = {}
    for step in (kind(target=chip, device="cpu") for kind in steps):
        if step.applies:
            reasons.update(step.apply(module.graph) or {})
            dead.eliminate(module.graph)
    module.graph.lint()
    module.recompile()
    return module, list(reasons.values())


def calls(module: fx.GraphModule, operator: Any) -> list[fx.Node]:
    return list(module.graph.find_nodes(op="call_function", target=operator))


def operators(module: fx.GraphModule) -> list[str]:
    """The mx operators of a graph, in order."""
    names = (str(node.target) for node in module.graph.nodes)
    return [name.split(".")[1] for name in names if name.startswith("mx.")]
