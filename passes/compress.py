"""compress: save activations for backward in MXFP8, for layers with ``saved: mxfp8``.

    forward saves x; backward reads x
    →  forward saves qdata, scale = cast(x); backward reads decode(qdata, scale)

`upstream` selects the saved tensors. Backward then reads the dequantized MX copy instead of x; its rounding
is the only change. If a GEMM of backward reads an MX copy of x, rowwise or columnwise, that copy is saved, so
that nothing is cast twice or saved twice:

    forward saves x and cast(x)          →  x is not saved
    backward casts x: cast(x)            →  forward casts it

Other copies have their blocks along the innermost dimension in memory, in the format of the layer's input if
that is MX, else in E4M3 with scales rounded up. These tensors stay as they are: inputs and outputs of the
model, which exist anyway; tensors that a BF16 product reads directly; tensors with rows shorter than a block,
such as statistics; dtypes other than BF16 and FP32. The pass runs on the partitioned graphs, because the
partitioner selects the saved tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from mxcompile import ops
from mxcompile.formats import BLOCK, Copy, Format, elem_type
from mxcompile.graph import dead
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import TRANSPARENT, argument, aten, packet
from mxcompile.graph.reshapes import Chain, chain_to, inverse, is_step, memory_order, repeated, undone
from mxcompile.graph.tags import GemmTag, Kind, hint, tag_of, tensor, value_of
from mxcompile.graph.transpose import readers
from mxcompile.models.names import GraphInput
from mxcompile.ops.view import Cast, result_of, results_of
from mxcompile.passes.roles.flow import viewed
from mxcompile.passes.upstream import upstream

_KEPT_APART = "saved_tensor_with_no_vc_check"
"""`node.meta` key: AOTAutograd saves the value apart, without a check of its version counter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compress:
    """Replaces saved tensors by MX copies.

    num_outputs: number of the model's own outputs, which come first in a forward graph. inputs: inputs of the
    captured graph.
    """

    name: ClassVar[str] = "compress"
    num_outputs: int
    inputs: tuple[GraphInput, ...]

    def apply(self, forward: fx.Graph, backward: fx.Graph) -> bool:
        """Replaces tensors that `forward` saves for `backward`. Returns whether it replaced any."""
        crossing = _Crossing(forward, backward, self.num_outputs)
        chosen = upstream(forward, self.inputs, crossing.candidates())
        changes = [crossing.compress(node, tag) for node, tag in chosen.items()]
        return any(changes)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Copy:
    """An MX copy in the forward graph. dim: dimension of its blocks. steps: the views before its cast."""

    qdata: fx.Node
    scale: fx.Node
    dim: int
    steps: Chain = ()


class _Crossing:
    """The tensors that forward saves for backward; replaces them by MX copies."""

    def __init__(self, forward: fx.Graph, backward: fx.Graph, num_outputs: int) -> None:
        self._forward = Builder(forward, Compress.name)
        self._backward = Builder(backward, Compress.name)
        (self._output,) = forward.find_nodes(op="output")
        returned = self._output.args[0]
        assert isinstance(returned, list | tuple)
        self._results, self._saved = list(returned[:num_outputs]), list(returned[num_outputs:])
        inputs = backward.find_nodes(op="placeholder")
        self._ends: dict[str, fx.Node] = {node.name: node for node in inputs}
        self._named = {node.name: node for node in forward.nodes}
        self._copies = _saved_copies(self._saved)

    def candidates(self) -> list[fx.Node]:
        """Returns the saved tensors that may be compressed."""
        results = {viewed(node) for node in self._results if isinstance(node, fx.Node)}
        saved = (node for node in self._saved if isinstance(node, fx.Node) and node.op == "call_function")
        return [node for node in saved if viewed(node) not in results and self._is_castable(node)]

    def _is_castable(self, node: fx.Node) -> bool:
        value, end = tensor(node), self._ends.get(node.name)
        if value is None or value.dtype not in (torch.bfloat16, torch.float32) or value.ndim < 2:
            return False
        is_repeated = 0 in map(hint, value.stride())
        if end is None or node.meta.get(_KEPT_APART) or viewed(node).op == "placeholder" or is_repeated:
            return False
        width = value.shape[memory_order(value)[-1]]
        return isinstance(width, int) and width >= BLOCK and not _read_by_kept_product(end)

    def compress(self, node: fx.Node, tag: GemmTag) -> bool:
        """Saves an MX copy instead of `node`, if a single copy is enough. Returns whether it did."""
        end = self._ends[node.name]
        casts = [user for user, _ in readers(end, is_step) if packet(user) in ops.CASTS]
        root, steps = chain_to(node)
        saved = self._copies.get(root)
        if len(casts) + (saved is not None) > 1:
            return False
        copy = self._moved(casts[0]) if casts else saved or self._new_copy(node, tag)
        if copy is None:
            return False
        value = self._restored(node, copy, steps if copy is saved else ())
        if value is None:
            return False
        for cast in casts:
            self._backward.replace_results(cast, [self._ends[part.name] for part in (copy.qdata, copy.scale)])
        end.replace_all_uses_with(value)
        self._backward.graph.erase_node(end)
        self._saved.remove(node)
        if copy is not saved:
            self._copies[root] = replace(copy, steps=(*steps, *copy.steps))
        self._output.args = ((*self._results, *self._saved),)
        return True

    def _moved(self, cast: fx.Node) -> _Copy | None:
        """Moves a backward cast into forward. Returns None if it is not MXFP8, or forward lacks its input."""
        source = self._named.get(argument(cast).name)
        forward_value, backward_value = tensor(source), tensor(argument(cast))
        view = Cast.from_node(cast)
        if view is None or not view.copy.is_mx or forward_value is None or backward_value is None:
            return None
        # backward has another symbol for a data-dependent size, so shapes cannot be compared
        if not statically_known_true(sym_eq(forward_value.shape, backward_value.shape)):
            return None
        assert source is not None
        steps = chain_to(argument(cast))[1]
        return self._cast(source, view.copy, cast, steps)

    def _new_copy(self, node: fx.Node, tag: GemmTag) -> _Copy:
        """Casts `node` along its innermost dimension in memory."""
        order, spec = memory_order(value_of(node)), Copy(format=Format())
        if tag.formats is not None:
            fmt = tag.formats[tag.tensors.index("x")]
            if fmt.is_mx:
                spec = Copy(format=Format(elem=fmt.elem, rounding=fmt.rounding))
        if order == sorted(order):
            return self._cast(node, spec, node, ())
        with self._forward.graph.inserting_before(node.next):
            source = self._forward.call(aten.permute.default, node, order, like=node)
        return self._cast(source, spec, node, (source,))

    def _cast(self, source: fx.Node, spec: Copy, like: fx.Node, steps: Chain) -> _Copy:
        """Returns the copy `spec` of `source`, from a cast in forward, or from a new cast behind `source`."""
        casts = (user for user in source.users if (view := Cast.from_node(user)) and view.copy == spec)
        if (cast := next(casts, None)) is None:
            with self._forward.graph.inserting_before(source.next):
                cast = self._forward.call(ops.cast, source, [str(spec)], like=like)
                cast.meta["mx_itemsize"] = value_of(source).element_size()
        with self._forward.graph.inserting_before(cast.next):
            qdata, scale = (
                self._forward.pick(cast, index, f"{source.name}_{part}")
                for index, part in enumerate(("qdata", "scale"))  # names that backward does not use
            )
        return _Copy(qdata=qdata, scale=scale, dim=spec.dim, steps=steps)

    def _restored(self, node: fx.Node, copy: _Copy, after: Chain) -> fx.Node | None:
        """Returns the value of `copy` in shape and layout of `node`; None if backward lacks a size.

        after: the steps from the root of `copy.steps` to `node`.
        """
        end, value = self._ends[node.name], value_of(node)
        parts = copy.qdata, copy.scale
        added = [part for part in parts if part.name not in self._ends]
        qdata, scale = (self._input(part, end) for part in parts)
        build = self._backward
        build.leaving.add(end)
        with build.graph.inserting_before(min(end.users)):
            form = Format.mx(elem_type(value_of(qdata).dtype))
            result = build.call(ops.decode, qdata, scale, copy.dim, str(form), value.dtype, like=end)
            begun = undone(copy.steps, result, build)
            repeated_value = None if begun is None else repeated(after, begun, build)
            if repeated_value is not None:
                return self._laid_out(repeated_value, value)
        # backward cannot reshape the copy: it is not saved
        build.leaving.remove(end)
        self._saved = [node for node in self._saved if node not in added]
        dead.eliminate(build.graph)
        for part in added:
            build.graph.erase_node(self._ends.pop(part.name))
        dead.eliminate(self._forward.graph)
        return None

    def _laid_out(self, node: fx.Node, like: torch.Tensor) -> fx.Node:
        """Returns `node` with its dimensions in memory in the order of `like`."""
        order, call = memory_order(like), self._backward.call
        if memory_order(value_of(node)) == order:
            return node
        permuted = call(aten.permute.default, node, order, like=node)
        stored = call(aten.clone.default, permuted, like=node, memory_format=torch.contiguous_format)
        return call(aten.permute.default, stored, inverse(order), like=node)

    def _input(self, part: fx.Node, end: fx.Node) -> fx.Node:
        """Returns the input of backward for `part` of a copy; adds it in front of `end` if it is new."""
        if part.name not in self._ends:
            with self._backward.graph.inserting_before(end):
                placeholder = self._backward.graph.placeholder(part.name)
            placeholder.meta = dict(part.meta)
            self._ends[part.name] = placeholder
            self._saved.insert(self._saved.index(self._named[end.name]), part)
        return self._ends[part.name]


def _saved_copies(saved: Sequence[Any]) -> dict[fx.Node, _Copy]:
    """Returns the MX copies among the saved nodes, by the root of their source (see `chain_to`)."""
    copies: dict[fx.Node, _Copy] = {}
    nodes = dict.fromkeys(node for node in saved if isinstance(node, fx.Node))
    for qdata in nodes:
        cast, index = result_of(qdata)
        view = Cast.from_node(cast)
        if cast is None or view is None or not view.copy.is_mx or index != 0:
            continue
        scales = [result for position, result in results_of(cast) if position == 1 and result in nodes]
        if scales:
            root, steps = chain_to(argument(cast))
            copies.setdefault(root, _Copy(qdata=qdata, scale=scales[0], dim=view.side, steps=steps))
    return copies


def _read_by_kept_product(node: fx.Node) -> bool:
    """Whether an unquantized product of a linear layer reads `node` directly."""
    tags = (tag_of(user) for user, _ in readers(node, lambda user: packet(user) in TRANSPARENT))
    return any(tag is not None and tag.kind is Kind.LINEAR and tag.formats is None for tag in tags)
