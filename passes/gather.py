"""gather: cast an activation before ranks gather it, so that MX bytes travel.

    quantize(move(wait(all_gather(x))))  →  move(wait(all_gather(pack(quantize(x)))))

Ranks of sequence parallelism hold tokens; blocks run along features, so the casts are the same, bit for bit.
Codes and scales of a token are one row of bytes, which one collective sends: 33/64 of BF16's. `move` is what
brings the ranks' parts into the order of tokens: views, permutations, slices, splits and concatenations that
leave the last dimension alone. A change of dtype among them, autocast's, is made before the cast.

Done where the cast along features is all that reads the gathered tensor: in inference, where the weight is
frozen, and where wgrad's copy is made of the rowwise one (``saved: transcode``). wgrad's own cast, along
tokens, is of the source: for that the source itself has to travel, and nothing is saved. Numerics do not
change.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from mxcompile import ops
from mxcompile.formats import ScaleLayout
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import COPIES, argument, aten, packet, prims
from mxcompile.graph.tags import tensor, value_of
from mxcompile.ops.view import Cast, argument_of, results_of

_VIEWS = frozenset({aten.view, aten.reshape, aten._unsafe_view})
_ALONG = frozenset({aten.cat, aten.slice, aten.split})
"""What takes rows apart or together along one dimension."""
_COLLECTIVES = torch.ops._c10d_functional


@dataclass(frozen=True, kw_only=True, slots=True)
class Gather:
    """No options: a cast goes in front where that changes nothing but the bytes."""

    name: ClassVar[str] = "gather"

    def apply(self, graph: fx.Graph) -> None:
        """Move casts of `graph` in front of the collectives that make what they read."""
        if not hasattr(_COLLECTIVES, "all_gather_into_tensor"):
            return
        gathers = graph.find_nodes(
            op="call_function", target=_COLLECTIVES.all_gather_into_tensor.default, sort=False
        )
        places = {node: place for place, node in enumerate(graph.nodes)} if gathers else {}
        for moved in [_Moved.of(node, places) for node in gathers]:
            if moved is not None:
                moved.write(Builder(graph, self.name))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Moved:
    """A collective `gather` whose result, moved by `steps` in graph order, only `casts` read, all alike.

    dtypes: what values become on the way to each of the casts, one after the other.
    """

    gather: fx.Node
    steps: tuple[fx.Node, ...]
    casts: tuple[fx.Node, ...]
    dtypes: tuple[torch.dtype, ...]

    @staticmethod
    def of(gather: fx.Node, places: Mapping[fx.Node, int]) -> _Moved | None:
        """Returns the move of casts in front of `gather`, or None. places: of the nodes in their graph."""
        value = tensor(argument(gather))
        if value is None or value.ndim < 2 or not isinstance(value.shape[-1], int):
            return None
        steps: dict[fx.Node, None] = {}
        casts: list[fx.Node] = []
        pending = [gather]
        while pending:
            node = pending.pop()
            for user in node.users:
                if user.target is ops.quantize:
                    casts.append(user)
                elif not _keeps_last(user, value.shape[-1]):
                    return None
                elif user not in steps:
                    steps[user] = None
                    pending.append(user)
        if not casts or len({_how(cast) for cast in casts}) > 1 or _how(casts[0]) is None:
            return None
        if any(arg not in steps and arg is not gather for step in steps for arg in _tensors(step)):
            return None
        moves = tuple(sorted(steps, key=places.__getitem__))
        dtypes = _dtypes(gather, moves, casts)
        if dtypes is None:
            return None
        return _Moved(gather=gather, steps=moves, casts=tuple(casts), dtypes=dtypes)

    def write(self, build: Builder) -> None:
        """Cast, send and move bytes instead."""
        graph, call = build.graph, build.call
        x, how = argument(self.gather), _how(self.casts[0])
        value = value_of(x)
        assert how is not None
        width, last, byte = value.shape[-1], value.ndim - 1, torch.uint8
        with graph.inserting_before(self.gather):
            for dtype in self.dtypes:
                x = call(prims.convert_element_type.default, x, dtype, like=self.casts[0])
            cast = call(ops.quantize, x, last, *how, like=self.casts[0])
            qdata, scale = (call(operator.getitem, cast, index, like=cast) for index in (0, 1))
            codes = call(aten.view.dtype, qdata, byte, like=cast)
            packed = call(aten.cat.default, [codes, scale], last, like=cast)
            sent = call(self.gather.target, packed, *self.gather.args[1:], like=self.gather)
        results = {self.gather: sent}
        for step in self.steps:
            if _converts(step):
                results[step] = results[argument(step)]
                continue
            with graph.inserting_before(step):
                results[step] = _repeated(step, results, packed.meta["val"].shape[-1], build)
        for each in self.casts:
            with graph.inserting_before(each):
                parts = _unpacked(results[argument(each)], width, how[0], build)
            for place, user in list(results_of(each)):
                build.replace(user, parts[place])
        for old in (*self.casts, *reversed(self.steps), self.gather):  # a collective is never dead by itself
            graph.erase_node(old)


def _unpacked(rows: fx.Node, width: int, elem: torch.dtype, build: Builder) -> tuple[fx.Node, fx.Node]:
    """Codes and scales of `rows` of bytes, `width` codes each."""
    value, call = value_of(rows), build.call
    parts = [
        call(aten.slice.Tensor, rows, value.ndim - 1, start, end, like=rows)
        for start, end in ((0, width), (width, 2**63 - 1))
    ]
    codes, scale = (
        call(aten.clone.default, part, like=rows, memory_format=torch.contiguous_format) for part in parts
    )
    return call(aten.view.dtype, codes, elem, like=rows), scale


def _how(node: fx.Node) -> tuple[torch.dtype, str] | None:
    """Element type and rounding of a cast along the last dimension; None for others."""
    cast = Cast.read(node)
    plain = not cast.square and cast.scale_layout == ScaleLayout.ROW_MAJOR
    along = tensor(cast.x) is not None and cast.side == -1
    return (cast.elem_dtype, cast.rounding) if plain and along else None


def _dtypes(
    gather: fx.Node, steps: Iterable[fx.Node], casts: Iterable[fx.Node]
) -> tuple[torch.dtype, ...] | None:
    """Returns the dtypes of the result of `gather` after `steps`, in graph order; None if casts differ."""
    dtypes: dict[fx.Node, tuple[torch.dtype, ...]] = {gather: ()}
    for step in steps:
        known = {dtypes[arg] for arg in _tensors(step)}
        if len(known) > 1:
            return None
        (dtypes[step],) = known
        if _converts(step):
            dtypes[step] += (step.meta["val"].dtype,)
    seen = {dtypes[argument(cast)] for cast in casts}
    return seen.pop() if len(seen) == 1 else None


def _converts(step: fx.Node) -> bool:
    """Whether `step` changes the dtype and nothing else."""
    return step.target is prims.convert_element_type.default


def _tensors(step: fx.Node) -> list[fx.Node]:
    return [arg for arg in step.all_input_nodes if not isinstance(arg.meta.get("val"), torch.SymInt)]


def _keeps_last(step: fx.Node, width: int) -> bool:
    """Whether `step` moves rows of `width` about and leaves each as it is."""
    what = packet(step)
    if what in (_COLLECTIVES.wait_tensor, operator.getitem) or what in COPIES or _converts(step):
        return True
    if what in _ALONG:
        value, dim = tensor(step.all_input_nodes[0]), argument_of(step, "dim")
        return value is not None and isinstance(dim, int) and dim % value.ndim != value.ndim - 1
    value = tensor(step)
    if value is None or not isinstance(value.shape[-1], int) or value.shape[-1] != width:
        return False
    if what is aten.permute:
        return bool(argument_of(step, "dims")[-1] % value.ndim == value.ndim - 1)
    return what in _VIEWS


def _repeated(step: fx.Node, results: dict[fx.Node, fx.Node], width: int, build: Builder) -> fx.Node:
    """`step` of what was made of its arguments, whose rows are `width` long."""
    args: Any = fx.node.map_arg(step.args, lambda node: results.get(node, node))
    if packet(step) in _VIEWS:
        args = (args[0], [*args[1][:-1], width])
    return build.call(step.target, *args, like=step, **step.kwargs)
