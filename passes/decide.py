"""decide: ask the policy about every GEMM, and keep in BF16 what cannot go to MXFP8.

Writes a choice with its reason, and for MXFP8 the formats of both operands, into the tags. A GEMM that
the policy sends to MXFP8 but whose dtype or form does not allow it falls back with the reason, or, in
strict mode, raises one error that names them all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from mxcompile.errors import UnsupportedError
from mxcompile.formats import Format
from mxcompile.graph.convolutions import convolution_words
from mxcompile.graph.opsets import CONVOLUTIONS, aten, is_grouped, packet
from mxcompile.graph.shapes import operands
from mxcompile.graph.tags import GemmTag, Kind, linear_layers, set_tag, tags_of, tensor
from mxcompile.policy import Choice, Decision, Policy, Precision

_SOURCES = (torch.float32, torch.bfloat16, torch.float16)
_SUPPORTED = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.addmv})


@dataclass(frozen=True, kw_only=True, slots=True)
class Decide:
    """Options: `policy`; `strict`, raise instead of falling back."""

    name: ClassVar[str] = "decide"
    policy: Policy
    strict: bool = False

    def apply(self, graph: fx.Graph) -> None:
        """Set choice and formats in every tag of `graph`. Raises `UnsupportedError` in strict mode."""
        refused: list[str] = []
        layers = linear_layers(graph)
        for node in graph.nodes:
            tags = tags_of(node)
            if tags and tags[0].kind is not Kind.LINEAR:
                set_tag(node, *(replace(tag, choice=_kept(node, tag)) for tag in tags))
        for gemms in layers.values():
            decision = self.policy.decide(gemms[0][1].as_layer())
            for node, tag in gemms:
                decided = _decided(node, tag, decision)
                set_tag(node, decided)
                if decided.formats is None and _wanted(tag, decision):
                    assert decided.choice is not None
                    refused.append(f"{tag.name} {tag.gemm}: {decided.choice.reason}")
        if refused and self.strict:
            raise UnsupportedError(
                "strict: the policy sends these to MXFP8, but they cannot go there:\n  "
                + "\n  ".join(refused)
            )


def _wanted(tag: GemmTag, decision: Decision) -> bool:
    return decision.choice(tag.gemm).precision is Precision.MXFP8


def _kept(node: fx.Node, tag: GemmTag) -> Choice:
    """Why a node that is not a linear layer stays as it is."""
    match tag.kind:
        case Kind.OPAQUE:
            known = tag.batch * tag.m * tag.n * tag.k > 0
            reason = f"opaque operator {packet(node)}" + ("" if known else ", FLOPs unknown")
        case Kind.CONVOLUTION:
            reason = convolution_words(node)
        case Kind.QUANTIZED:
            reason = "quantized by the model"
        case _:
            reason = f"role {tag.role}"
    return Choice(precision=Precision.BF16, reason=reason)


def _decided(node: fx.Node, tag: GemmTag, decision: Decision) -> GemmTag:
    choice = decision.choice(tag.gemm)
    if choice.precision is Precision.MXFP8:
        obstacle = _obstacle(node)
        if obstacle is None:
            formats = (_format(decision, tag.tensors[0]), _format(decision, tag.tensors[1]))
            return replace(tag, choice=choice, formats=formats, saved=decision.saved)
        choice = Choice(precision=Precision.BF16, reason=obstacle)
    return replace(tag, choice=choice)


def _format(decision: Decision, which: str) -> Format:
    formats: dict[str, Format] = {"x": decision.x, "w": decision.w, "dy": decision.dy}
    return formats[which]


def _obstacle(node: fx.Node) -> str | None:
    """What keeps the GEMM `node` from MXFP8, or None."""
    if not (packet(node) in _SUPPORTED or packet(node) in CONVOLUTIONS or is_grouped(node)):
        return f"unsupported operator {packet(node)}"
    for operand in operands(node):
        value = tensor(operand)
        if value is None:
            return "unsupported operand"
        if value.dtype not in _SOURCES:
            return f"unsupported dtype {str(value.dtype).removeprefix('torch.')}"
        if value.layout is not torch.strided:
            return f"unsupported layout {str(value.layout).removeprefix('torch.')}"
    factors: dict[str, Any] = {key: node.kwargs.get(key, 1) for key in ("alpha", "beta")}
    if any(not isinstance(factor, int | float) for factor in factors.values()):
        return "unsupported alpha or beta"
    return None
