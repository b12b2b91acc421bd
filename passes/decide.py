"""decide: apply the policy to every GEMM; GEMMs that cannot be quantized stay as they are.

Writes a choice with its reason into each tag, and the formats of both operands if the GEMM is quantized. If
the policy quantizes GEMMs whose dtype or operator does not allow it, they fall back with a reason; in strict
mode one error names them all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from mxcompile.errors import UnsupportedError
from mxcompile.formats import UNQUANTIZED, labels
from mxcompile.graph.bodies import bodies
from mxcompile.graph.convolutions import convolution_words
from mxcompile.graph.opsets import BIASED, CONVOLUTIONS, aten, called_packet, is_grouped, packet
from mxcompile.graph.shapes import operands
from mxcompile.graph.tags import AUTOCAST_KEY, GemmTag, Kind, change_tag, layers, tags_of, tensor
from mxcompile.policy import Backward, Choice, Code, Decision, Gemm, Policy, Reason

_SOURCES = (torch.float32, torch.bfloat16, torch.float16)
_SUPPORTED = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.addmv})


@dataclass(frozen=True, kw_only=True, slots=True)
class Decide:
    """Sets choices.

    strict: whether to raise instead of falling back. cut: reason why the graph is not the whole model, or "".
    """

    name: ClassVar[str] = "decide"
    policy: Policy
    strict: bool = False
    cut: str = ""

    def apply(self, graph: fx.Graph) -> None:
        """Sets choice and formats in every tag of `graph`. Raises `UnsupportedError` if strict."""
        refused: list[str] = []
        wanted: set[str] = set()
        keep_products(graph)
        for gemms in layers(graph).values():
            decision = self.policy.decide(gemms[0][1].as_layer())
            for node, tag in gemms:
                choice = decision.choice(tag.gemm)
                reason = obstacle(node)
                new_tag = decided(tag, decision, reason)
                if new_tag.formats is not None and AUTOCAST_KEY in node.meta.get("custom", ()):
                    new_tag = new_tag.with_reason(Reason(Code.AUTOCAST_OFF))
                if self.cut and new_tag.whole is None:
                    new_tag = new_tag.with_reason(Reason(Code.CUT, self.cut))
                change_tag(node, tag, new_tag)
                if reason is not None and choice.formats is not None:
                    refused.append(f"{tag.name} {tag.gemm}: {reason}")
                    wanted.add(choice.precision)
        if refused and self.strict:
            raise UnsupportedError.from_refused(refused, labels(wanted))


def keep_products(graph: fx.Graph) -> None:
    """Sets the choice in the tags of products that are not layers; no policy rule applies to them."""
    for node in graph.nodes:
        for tag in tags_of(node):
            if not tag.is_layer:
                change_tag(node, tag, replace(tag, choice=_unquantized(node, tag)))


def _unquantized(node: fx.Node, tag: GemmTag) -> Choice:
    """Returns the choice for a product that is not a layer, with the reason why it stays as it is."""
    match tag.kind:
        case Kind.OPAQUE:
            reason = _hidden(node)
        case Kind.TANGENT:
            reason = Reason(Code.TANGENT)
        case Kind.CONVOLUTION:
            reason = Reason(Code.CONVOLUTION, convolution_words(node))
        case Kind.QUANTIZED:
            reason = Reason(Code.BY_MODEL)
        case Kind.PRODUCT if tag.whole is not None:
            reason = Reason(Code.NO_PARAMETER)
        case _:
            reason = Reason(Code.ROLE, tag.role)
    return Choice(precision=UNQUANTIZED.name, reason=reason)


def decided(tag: GemmTag, decision: Decision, reason: Reason | None) -> GemmTag:
    """Returns `tag` of a layer with the choice and the formats of `decision`.

    reason: reason why its operands cannot be quantized (see `obstacle`), or None.
    """
    choice = decision.choice(tag.gemm)
    formats = None
    if reason is not None and (choice.formats is not None or tag.kind is Kind.OPAQUE):
        choice = Choice(precision=UNQUANTIZED.name, reason=reason)
    elif choice.formats is not None:
        is_wgrad = tag.gemm is Gemm.WGRAD
        lhs, rhs = (choice.formats.operand_format(name, wgrad=is_wgrad) for name in tag.tensors)
        formats = lhs, rhs
    forward, of_fprop = None, decision.fprop.formats
    if decision.backward is Backward.DEQUANTIZED and tag.gemm is not Gemm.FPROP and of_fprop is not None:
        forward = of_fprop.x, of_fprop.w
    return replace(
        tag,
        choice=choice,
        formats=formats,
        forward=None if reason else forward,
        saved=decision.saved,
        sent=decision.sent,
    )


def _hidden(node: fx.Node) -> Reason:
    """Returns the reason why no pass can rewrite the products inside of the operator `node`."""
    counted = any(tag.flops for tag in tags_of(node))
    code = Code.BODY if bodies(node) else Code.OPAQUE if counted else Code.UNCOUNTED
    return Reason(code, called_packet(node))


def obstacle(node: fx.Node) -> Reason | None:
    """Returns the reason why the operands of the GEMM `node` cannot be quantized, or None."""
    if any(tag.kind is Kind.OPAQUE for tag in tags_of(node)):
        return _hidden(node)
    if any(tag.argument for tag in tags_of(node)):
        return Reason(Code.ARGUMENT)
    if not (packet(node) in _SUPPORTED or packet(node) in CONVOLUTIONS or is_grouped(node)):
        return Reason(Code.OPERATOR, packet(node))
    values = [tensor(operand) for operand in operands(node)]
    for value in values:
        if value is None:
            return Reason(Code.OPERAND)
        if value.dtype not in _SOURCES:
            return Reason(Code.DTYPE, str(value.dtype).removeprefix("torch."))
        if value.layout is not torch.strided:
            return Reason(Code.LAYOUT, str(value.layout).removeprefix("torch."))
    if packet(node) in BIASED:
        values.append(tensor(node.args[0]))
    dtypes = dict.fromkeys(str(value.dtype).removeprefix("torch.") for value in values if value is not None)
    if len(dtypes) > 1:  # quantized operands would give a result
        return Reason(Code.DTYPES, *[*dtypes][:2])
    if not all(isinstance(node.kwargs.get(key, 1), int | float) for key in ("alpha", "beta")):
        return Reason(Code.FACTORS)
    return None
