"""Insertion of nodes with fake values and provenance, shared by all passes."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._mode_utils import no_dispatch

from mxcompile import ops
from mxcompile.graph.tags import PASS_KEY, tensor
from mxcompile.ops.define import as_returned
from mxcompile.ops.view import results_of

aten, prims = torch.ops.aten, torch.ops.prims

_INHERITED = (
    "nn_module_stack",
    "fwd_nn_module_stack",
    "stack_trace",
    "seq_nr",
    "partitioner_tag",
    "source_fn_stack",
    "original_aten",
    "custom",
    "recompute",
    "ac_graph_id",
)


class Builder:
    """Inserts call nodes into `graph` for the pass named `made_by`.

    leaving: inputs that the pass removes; sizes are not read from them.
    """

    def __init__(self, graph: fx.Graph, made_by: str) -> None:
        self.graph = graph
        self.made_by = made_by
        self.leaving: set[fx.Node] = set()
        values = (node.meta.get("val") for node in graph.nodes)
        first = next((value for value in values if isinstance(value, FakeTensor)), None)
        self._fake = detect_fake_mode([first]) if first is not None else None

    def call(self, target: Any, *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
        """Inserts a call at the current insertion point, with its fake value and the provenance of `like`."""
        return self._filled(self.graph.call_function(target, args, kwargs), like)

    def pick(self, several: fx.Node, index: int, named: str) -> fx.Node:
        """Inserts the result `index` of `several`, as a node named `named`."""
        picked = self.graph.create_node("call_function", operator.getitem, (several, index), name=named)
        return self._filled(picked, several)

    def results(self, several: fx.Node) -> list[fx.Node]:
        """Inserts getitem nodes for all results of `several` at the current insertion point."""
        indices = range(len(several.meta["val"]))
        return [self.call(operator.getitem, several, index, like=several) for index in indices]

    def converted(self, node: fx.Node, dtype: torch.dtype, like: fx.Node) -> fx.Node:
        """Returns `node` converted to `dtype`, or `node` itself if it already has the dtype."""
        value = tensor(node)
        if value is not None and value.dtype is dtype:
            return node
        return self.call(prims.convert_element_type.default, node, dtype, like=like)

    def _filled(self, node: fx.Node, like: fx.Node) -> fx.Node:
        target: Any = node.target
        arguments: Any = node.args, node.kwargs
        node.meta.update({key: like.meta[key] for key in _INHERITED if key in like.meta})
        node.meta[PASS_KEY] = self.made_by
        positional, keywords = fx.node.map_arg(arguments, lambda n: n.meta["val"])
        if target is operator.getitem and isinstance(positional[0], list | tuple):
            node.meta["val"] = operator.getitem(*positional)
        elif target in ops.SPECS and self._fake is not None:
            results = [self._empty(spec, positional[0].device) for spec in ops.SPECS[target](*positional)]
            node.meta["val"] = as_returned(target, results)
        elif self._fake and not keywords and (like_it := _like(target, positional, self._fake)) is not None:
            node.meta["val"] = self._as_fake(like_it, positional[0].device)
        else:
            with self._fake or nullcontext():
                node.meta["val"] = target(*positional, **keywords)
        return node

    def _empty(self, spec: ops.Spec, device: torch.device) -> torch.Tensor:
        """Returns a fake tensor of the shape and dtype in `spec` without the cost of dispatching a call."""
        shape, dtype = spec
        with no_dispatch():
            meta = torch.empty(shape, dtype=dtype, device="meta")
        return self._as_fake(meta, device)

    def _as_fake(self, meta: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns a fake tensor on `device` with the layout of `meta`, which must have no other reference."""
        assert self._fake is not None
        return FakeTensor(self._fake, meta, device)

    def size(self, node: fx.Node, dim: int, like: fx.Node) -> Any:
        """Returns the length of dimension `dim` of the tensor `node`: an int, or a node if it is symbolic."""
        length = node.meta["val"].shape[dim]
        if isinstance(length, int):
            return length
        return self.call(torch.ops.aten.sym_size.int, node, dim, like=like)

    def sizes(self, shape: Iterable[Any], like: fx.Node) -> list[Any] | None:
        """Returns `shape` as call arguments; None if no graph input provides one of its symbolic sizes."""
        values = [size if isinstance(size, int) else self._input_of_size(size, like) for size in shape]
        return None if None in values else values

    def _input_of_size(self, size: torch.SymInt, like: fx.Node) -> fx.Node | None:
        """Returns a graph input that is `size`, or a sym_size node of an input; None without one."""
        wanted = size.node.expr
        for node in self.graph.find_nodes(op="placeholder"):
            value = None if node in self.leaving else node.meta.get("val")
            if isinstance(value, torch.SymInt) and value.node.expr == wanted:
                same: fx.Node = node
                return same
            for dim, length in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                if isinstance(length, torch.SymInt) and length.node.expr == wanted:
                    return self.call(torch.ops.aten.sym_size.int, node, dim, like=like)
        return None

    def range(self, length: Any, device: torch.device, like: fx.Node) -> fx.Node:
        """Returns 0, 1, …, length − 1 as int64, by the operator that decomposed graphs use."""
        iota = torch.ops.prims.iota.default
        options = {"dtype": torch.int64, "device": device, "requires_grad": False}
        return self.call(iota, length, like=like, start=0, step=1, **options)

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Replaces `old` by `new` and erases it."""
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)

    def replace_results(self, old: fx.Node, new: Sequence[fx.Node]) -> None:
        """Replaces the results of `old` by `new` and erases `old`."""
        for index, result in list(results_of(old)):
            self.replace(result, new[index])
        self.graph.erase_node(old)


def _like(target: Any, args: Any, fake: FakeTensorMode) -> torch.Tensor | None:
    """Returns a meta tensor with the layout of a call's result, for frequent operators only; else None.

    args: fake tensors, whose sizes must be fixed. A meta call takes a tenth of the time of a fake call.
    """
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if not all(isinstance(size, int) for value in tensors for size in value.shape):
        return None
    if target is aten.permute.default:
        with in_kernel_invocation_manager(fake):
            return target(*args)  # type: ignore[no-any-return]
    with no_dispatch():
        if target is aten.mm.default:
            return torch.empty((len(args[0]), args[1].shape[1]), dtype=args[0].dtype, device="meta")
        if target is prims.convert_element_type.default and is_non_overlapping_and_dense_or_false(args[0]):
            return torch.empty_strided(args[0].shape, args[0].stride(), dtype=args[1], device="meta")
    return None
