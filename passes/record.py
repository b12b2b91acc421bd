"""Converts tags to records of the report."""

from __future__ import annotations

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from mxcompile import ops
from mxcompile.errors import VerificationError
from mxcompile.formats import Format
from mxcompile.graph.opsets import is_matmul_like, packet
from mxcompile.graph.tags import GemmTag, tags_of
from mxcompile.policy import Gemm
from mxcompile.report import STORED, GemmRecord, OperandFormat


def records(graph: fx.Graph) -> tuple[GemmRecord, ...]:
    """Returns one record per GEMM of `graph`, by index. Raises `VerificationError` if a tag is missing."""
    tagged = [(tag, node) for node in graph.nodes for tag in tags_of(node)]
    tagged.sort(key=lambda pair: pair[0].index)
    untagged = [
        node.name
        for node in graph.nodes
        if (is_matmul_like(node) or packet(node) in ops.PRODUCTS) and not tags_of(node)
    ]
    first = tagged[0][0].index if tagged else 0
    if untagged or [tag.index for tag, _ in tagged] != list(range(first, first + len(tagged))):
        raise VerificationError(f"matmuls without a record: {untagged or 'lost in a pass'}")
    return tuple(record_of(tag, _dtype(node)) for tag, node in tagged)


def _dtype(node: fx.Node) -> str:
    """Returns the dtype of the first tensor of the value of `node`, "" if there is none."""
    leaves = tree_leaves(node.meta.get("val"))
    return next((str(leaf.dtype).removeprefix("torch.") for leaf in leaves if isinstance(leaf, Tensor)), "")


def record_of(tag: GemmTag, dtype: str = "") -> GemmRecord:
    """Returns the record of a GEMM, whose tag has a choice. dtype: dtype of its result."""
    assert tag.choice is not None
    return GemmRecord(
        name=tag.name,
        role=str(tag.role),
        gemm=str(tag.gemm),
        batch=tag.batch,
        m=tag.m,
        n=tag.n,
        k=tag.k,
        precision=tag.choice.precision,
        reason=str(tag.choice.reason),
        code=str(tag.choice.reason.code),
        facts=tag.choice.reason.facts,
        formats=_formats(tag),
        dtype=dtype,
        kernel=tag.kernel,
        module=tag.module,
        block=tag.block,
        source=tag.source,
        evidence=tag.evidence.holds,
        nearest=tag.evidence.nearest,
    )


def _formats(tag: GemmTag) -> tuple[OperandFormat, ...]:
    """Returns the formats of both operands, or of a stored weight if only the weight is quantized, or ()."""
    formats = tuple(
        _operand_format(tag, operand, fmt)
        for operand, fmt in zip(tag.tensors, tag.formats or (), strict=False)
    )
    if formats or tag.stored is None or "w" not in tag.tensors:
        return formats
    stored = tag.stored
    return (OperandFormat(operand="w", elem=stored.elem.name, block=str(stored.tile), rounding=STORED),)


def _operand_format(tag: GemmTag, operand: str, fmt: Format) -> OperandFormat:
    # `reuse` reads a weight that is stored in `fmt` without a cast
    stored = operand == "w" and tag.gemm is Gemm.FPROP and fmt.unchosen == tag.stored and not tag.recast
    return OperandFormat(
        operand=operand,
        elem=fmt.elem.name,
        block=str(fmt.tile),
        rounding=STORED if stored else fmt.derivation,
        elements=str(fmt.elements),
        amax=str(fmt.amax),
        transform=fmt.transform,
        scales="" if stored else fmt.scales,
    )
