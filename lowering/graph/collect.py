"""collect: one operator of all that is made of a matrix whose MX products are emulated.

    quantize_dequantize(x, −1), quantize(x, −2), …  →  quantize_operands(x)               one read of x

Values are what a product of this graph multiplies, codes and scales what another graph or a collective reads.
For chips without an MX GEMM, after `expand`. One form of each direction is in an operator. Codes of squares,
and casts of batches whose matrices do not end with a block, stay as they are. Numerics do not change.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from mxcompile import ops
from mxcompile.formats import BLOCK, ScaleLayout
from mxcompile.graph.build import Builder
from mxcompile.graph.tags import is_empty, tensor
from mxcompile.lowering.graph.lowering_pass import COLLECTED, NO_REASONS, LoweringPass, Reasons
from mxcompile.lowering.templates.configs import single
from mxcompile.ops.view import Cast

_FORMS = {ops.quantize: "codes", ops.quantize_dequantize: "values"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _ReadCast:
    """side: the dimension of blocks, −1 or −2. dtype: of values."""

    node: fx.Node
    key: tuple[Any, ...]
    side: int
    dtype: torch.dtype | None


@dataclass(kw_only=True, slots=True)
class _Group:
    """Casts of one matrix in one format, by their sides."""

    casts: dict[int, _ReadCast] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype | None:
        return next((cast.dtype for cast in self.casts.values() if cast.dtype), None)

    def takes(self, cast: _ReadCast) -> bool:
        """Whether `cast` may join."""
        return cast.side not in self.casts and (None in (cast.dtype, self.dtype) or cast.dtype is self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Collect(LoweringPass):
    """For GPUs without an MX GEMM."""

    name: ClassVar[str] = "collect"
    templates: ClassVar[tuple[str, ...]] = COLLECTED

    @property
    def applies(self) -> bool:
        """Where what MX operands stand for is multiplied."""
        return self.target.emulates

    def apply(self, graph: fx.Graph) -> Reasons:
        """Merge the casts of `graph`, each where the first of its matrix was."""
        build = Builder(graph, self.name)
        groups: dict[tuple[Any, ...], list[_Group]] = {}
        for node in graph.nodes:
            cast = self._cast(node)
            if cast is None:
                continue
            waiting = groups.setdefault(cast.key, [])
            group = next((group for group in waiting if group.takes(cast)), None)
            if group is None:
                waiting.append(group := _Group())
            group.casts[cast.side] = cast
        for waiting in groups.values():
            for group in waiting:
                _write(build, group)
        return NO_REASONS

    def _cast(self, node: fx.Node) -> _ReadCast | None:
        """Returns the cast that `node` is, if the template makes it."""
        cast = Cast.of(node) if node.target in _FORMS and node.users else None
        value = None if cast is None else tensor(cast.x)
        if cast is None or value is None:
            return None
        coded = cast.dtype is None
        if coded and (cast.square or cast.scale_layout != ScaleLayout.ROW_MAJOR):
            return None
        if value.device.type != self.device or not _fits(value, -2 if cast.square else cast.side):
            return None
        side = -1 if cast.square else cast.side  # the same both ways
        key = cast.x, cast.elem_dtype, cast.rounding, cast.square
        return _ReadCast(node=node, key=key, side=side, dtype=cast.dtype)


def _fits(value: torch.Tensor, side: int) -> bool:
    """Whether `value`, seen as one matrix, has the blocks that it has along `side`."""
    if value.ndim < 2 or side not in (-1, -2) or not value.dtype.is_floating_point:
        return False
    if is_empty(value.shape):
        return False
    if single(value.shape):
        return False
    rows = value.shape[-2]
    return value.ndim == 2 or side == -1 or (isinstance(rows, int) and rows % BLOCK == 0)


def _write(build: Builder, group: _Group) -> None:
    casts = group.casts
    first = min(cast.node for cast in casts.values())
    source, elem, rounding, square = next(iter(casts.values())).key
    forms = [_FORMS[casts[side].node.target] if side in casts else "none" for side in (-1, -2)]
    if square:
        forms = ["squares", "none"]
    with build.graph.inserting_before(first):
        dtype = group.dtype or torch.bfloat16
        new_node = build.call(ops.quantize_operands, source, None, elem, rounding, dtype, *forms, like=first)
        results = {
            side: [build.call(operator.getitem, new_node, 2 * place + part, like=first) for part in range(2)]
            for place, side in enumerate((-1, -2))
            if side in casts
        }
    for side, cast in casts.items():
        if cast.dtype is not None:
            build.replace(cast.node, results[side][0])
        else:
            build.replace_results(cast.node, results[side])
        for result in results[side]:
            if not result.users:
                build.graph.erase_node(result)
