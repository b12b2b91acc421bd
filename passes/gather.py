"""gather: cast an activation before ranks exchange it, so that they send MX bytes.

    cast(move(wait(all_gather(x))))  →  move(wait(all_gather(pack(cast(x)))))

Ranks of sequence parallelism gather tokens; ranks of expert parallelism send them to their experts
(``all_to_all_single``). Blocks run along features, so the casts are bit-identical. Codes and scales of a
token are one row of bytes, which one collective sends: 33/64 of BF16's bytes. `move` reorders rows (see
`rows`): views, permutations, slices, splits, concatenations, picks by an index, masks of rows. If it also
changes the dtype (autocast), that conversion moves before the cast.

The pass applies if only casts along features read the tensor: in inference, with a frozen weight, and where
wgrad's copy is made of the rowwise copy (``saved: transcode``, ``sent: mxfp8``). Otherwise wgrad casts the
source along tokens, so the source itself has to be sent. Numerics do not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import fx

from mxcompile import ops
from mxcompile.formats import Copy, ScaleLayout
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import SIZED_VIEWS, argument, aten, packet, prims
from mxcompile.graph.tags import set_tag, tagged, tensor, value_of
from mxcompile.graph.transpose import untransposed
from mxcompile.ops.view import Cast, Product
from mxcompile.passes.rows import EXCHANGES, arrives, is_conversion, is_zero, moved_rows
from mxcompile.policy import Code, Reason, Sent

_SIZE = aten.sym_size.int


@dataclass(frozen=True, kw_only=True, slots=True)
class Gather:
    """Moves casts in front of collectives, if no value changes."""

    name: ClassVar[str] = "gather"

    def apply(self, graph: fx.Graph) -> None:
        """Moves casts of `graph` in front of the collectives whose results they read."""
        nodes = (graph.find_nodes(op="call_function", target=target) for target in EXCHANGES)
        exchanges = [*chain.from_iterable(nodes)]
        for moved in [_Moved.from_gather(node) for node in exchanges]:
            if moved is not None:
                moved.write(Builder(graph, self.name))
        if exchanges:
            _explain_others(graph)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Moved:
    """A collective `gather`, the `steps` that move its rows, and the equal `casts` that alone read the rows.

    steps: in graph order. copy: the copy that the casts make. sizes: readers of the number of rows. dtypes:
    conversions before each cast, in order.
    """

    gather: fx.Node
    steps: tuple[fx.Node, ...]
    casts: Sequence[fx.Node]
    copy: Copy
    sizes: Sequence[fx.Node]
    dtypes: tuple[torch.dtype, ...]

    @staticmethod
    def from_gather(gather: fx.Node) -> _Moved | None:
        """Returns the move of casts in front of `gather`, or None."""
        value = tensor(argument(gather))
        if value is None or value.ndim < 2 or not isinstance(value.shape[-1], int):
            return None
        steps: set[fx.Node] = set()
        casts: list[fx.Node] = []
        sizes: list[fx.Node] = []
        pending = [gather]
        while pending:
            node = pending.pop()
            for user in node.users:
                if _is_mx(user):
                    casts.append(user)
                elif user.target is _SIZE:
                    sizes.append(user)
                elif node not in (moved_rows(user) or ()):
                    return None
                elif user not in steps:
                    steps.add(user)
                    pending.append(user)
        copies = {_rowwise_copy(cast) for cast in casts}
        if len(copies) != 1 or (copy := copies.pop()) is None:
            return None
        if any(rows not in steps and rows is not gather for step in steps for rows in moved_rows(step) or ()):
            return None
        moves = tuple(sorted(steps))
        if (dtypes := _dtypes(gather, moves, casts)) is None:
            return None
        return _Moved(gather=gather, steps=moves, casts=casts, copy=copy, sizes=sizes, dtypes=dtypes)

    def write(self, build: Builder) -> None:
        """Replaces the nodes by a cast, a collective and moves of bytes."""
        graph, call = build.graph, build.call
        x = argument(self.gather)
        value = value_of(x)
        width, last, byte = value.shape[-1], value.ndim - 1, torch.uint8
        with graph.inserting_before(self.gather):
            for dtype in self.dtypes:
                x = call(prims.convert_element_type.default, x, dtype, like=self.casts[0])
            cast = call(ops.cast, x, [str(self.copy)], like=self.casts[0])
            qdata, scale = build.results(cast)
            codes = call(aten.view.dtype, qdata, byte, like=cast)
            packed = call(aten.cat.default, [codes, scale], last, like=cast)
            sent = call(self.gather.target, packed, *self.gather.args[1:], like=self.gather)
        results = {self.gather: sent}
        for step in self.steps:
            if is_conversion(step):
                results[step] = results[argument(step)]
                continue
            with graph.inserting_before(step):
                results[step] = _repeated(step, results, packed.meta["val"].shape[-1], build)
        for size in self.sizes:
            with graph.inserting_before(size):
                build.replace(size, call(_SIZE, results[argument(size)], size.args[1], like=size))
        for old_cast in self.casts:
            with graph.inserting_before(old_cast):
                parts = _unpacked(results[argument(old_cast)], width, self.copy.elem.dtype, build)
            build.replace_results(old_cast, parts)
        for old in (*reversed(self.steps), self.gather):  # dead code elimination keeps collectives
            graph.erase_node(old)


def _unpacked(rows: fx.Node, width: int, elem: torch.dtype, build: Builder) -> tuple[fx.Node, fx.Node]:
    """Returns codes and scales of `rows` of bytes with `width` codes each."""
    value, call = value_of(rows), build.call
    parts = [
        call(aten.slice.Tensor, rows, value.ndim - 1, start, end, like=rows)
        for start, end in ((0, width), (width, 2**63 - 1))
    ]
    codes, scale = (
        call(aten.clone.default, part, like=rows, memory_format=torch.contiguous_format) for part in parts
    )
    return call(aten.view.dtype, codes, elem, like=rows), scale


def _explain_others(graph: fx.Graph) -> None:
    """Adds a reason to the GEMMs of layers with ``sent: mxfp8`` whose operands are still sent unquantized."""
    for node, tag in tagged(graph):
        if tag.sent is not Sent.MXFP8 or tag.formats is None:
            continue
        for operand, (qdata, _) in zip(tag.tensors, Product.read(node).sides, strict=True):
            cast = argument(untransposed(qdata)[0]) if operand != "w" else None
            if cast is not None and packet(cast) in ops.CASTS and arrives(argument(cast)):
                why = "another operator reads it" if _is_mx(cast) else "it is not cast to MXFP8"
                tag = tag.with_reason(Reason(Code.NOT_SENT, operand, why))
        set_tag(node, tag)


def _is_mx(node: fx.Node) -> bool:
    """Whether `node` is a cast to MXFP8."""
    cast = Cast.from_node(node)
    return cast is not None and cast.copy.is_mx


def _rowwise_copy(node: fx.Node) -> Copy | None:
    """Returns the copy that `node`, a cast along the last dimension, makes; None for other casts."""
    copy = Cast.read(node).copy
    return copy if copy.layout is ScaleLayout.ROW_MAJOR and copy.dim == -1 else None


def _dtypes(
    gather: fx.Node, steps: Iterable[fx.Node], casts: Iterable[fx.Node]
) -> tuple[torch.dtype, ...] | None:
    """Returns the dtypes that `steps` convert rows to, in order; None if they differ between `casts`."""
    dtypes: dict[fx.Node, tuple[torch.dtype, ...]] = {gather: ()}
    for step in steps:
        before = {dtypes[rows] for rows in moved_rows(step) or ()}
        if len(before) > 1:
            return None
        (dtypes[step],) = before
        if is_conversion(step):
            dtypes[step] += (step.meta["val"].dtype,)
    distinct = {dtypes[argument(cast)] for cast in casts}
    return distinct.pop() if len(distinct) == 1 else None


def _repeated(step: fx.Node, results: dict[fx.Node, fx.Node], width: int, build: Builder) -> fx.Node:
    """Applies `step` to the results for its arguments, rows of `width` bytes. Zeros become zero bytes."""

    def as_bytes(node: fx.Node) -> fx.Node:
        if node in results or not is_zero(node) or not value_of(node).dtype.is_floating_point:
            return results.get(node, node)
        value = value_of(node)
        shape: Any = node.args[0] if packet(node) is aten.full else value.shape
        sizes, options = [*shape[:-1], width][: len(shape)], {"dtype": torch.uint8, "device": value.device}
        return build.call(aten.full.default, sizes, 0, like=step, **options)

    args: Any = fx.node.map_arg(step.args, as_bytes)
    if packet(step) in SIZED_VIEWS:
        args = (args[0], [*args[1][:-1], width])
    return build.call(step.target, *args, like=step, **step.kwargs)
