"""Moving a graph that was traced on fake CPU tensors to a GPU, before anything looks at it.

A torch without a GPU build has no autograd on GPU tensors, not even on fake ones, so a model is traced on the
CPU and its joint graph moved: every value, every device argument, and the attention operators, which are not
the same on both.

    CPU                                          GPU
    _scaled_dot_product_flash_attention_for_cpu  _scaled_dot_product_flash_attention without a mask,
                                                 _scaled_dot_product_efficient_attention with one

A scalar constant stays where it is, as it would in a graph of a GPU model.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from mxcompile.graph.opsets import ATTENTION_FORWARD, argument, aten, packet
from mxcompile.graph.tags import KEY, set_tag, tags_of

_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward
_PADDED = 16  # a mask's rows start on multiples of this many elements in memory


def move(graph: fx.Graph, device: torch.device) -> None:
    """Make `graph`, of values on the CPU, one on `device`, a GPU."""
    values = [node.meta.get("val") for node in graph.nodes]
    mode = detect_fake_mode([value for value in values if isinstance(value, FakeTensor)])
    if mode is None:
        return
    mover = _Mover(mode, device)
    for node in graph.nodes:
        mover.move(node)
    _Attention(graph, mode).replace()
    graph.lint()


class _Mover:
    """Values and arguments from the CPU to a device; one new value for one old one."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        self._mode = mode
        self._device = device

    def move(self, node: fx.Node) -> None:
        """Move the values of `node` and the devices among its arguments."""
        if "val" in node.meta:
            node.meta["val"] = tree_map_only(Tensor, self.value, node.meta["val"])
        node.args = self._arguments(node.args)
        node.kwargs = self._arguments(node.kwargs)

    def _arguments(self, arguments: Any) -> Any:
        if isinstance(arguments, tuple | list):
            return type(arguments)(self._arguments(item) for item in arguments)
        if isinstance(arguments, dict):
            return {key: self._arguments(item) for key, item in arguments.items()}
        if isinstance(arguments, torch.device) and arguments.type == "cpu":
            return self._device
        return arguments

    def value(self, tensor: Tensor) -> Tensor:
        """`tensor` on the device."""
        if not isinstance(tensor, FakeTensor) or tensor.device.type != "cpu":
            return tensor
        with self._mode, torch.no_grad():
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)


class _Attention:
    """Attention operators of the CPU become those of a GPU."""

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode) -> None:
        self._graph = graph
        self._mode = mode
        self._forwards: dict[fx.Node, fx.Node] = {}

    def replace(self) -> None:
        """Replace them all, each backward with what its forward has saved."""
        for node in list(self._graph.nodes):
            if packet(node) is _FORWARD:
                self._replace_forward(node)
        for node in list(self._graph.nodes):
            if packet(node) is _BACKWARD:
                self._replace_backward(node)
        for old in reversed(self._forwards):
            self._graph.erase_node(old)

    def _replace_forward(self, node: fx.Node) -> None:
        q, k, v, dropout, causal, mask, scale = _forward_arguments(node)
        with self._graph.inserting_before(node):
            if mask is None:
                new = self._call(
                    aten._scaled_dot_product_flash_attention.default,
                    *(q, k, v, dropout, causal, False),
                    like=node,
                    scale=scale,
                )
            else:
                new = self._call(
                    aten._scaled_dot_product_efficient_attention.default,
                    *(q, k, v, self._bias(q, k, mask, node), True, dropout, causal),
                    like=node,
                    scale=scale,
                )
        set_tag(new, *tags_of(node))
        for user in list(node.users):
            if user.target is operator.getitem:
                self._swap_result(user, new)
        self._forwards[node] = new

    def _swap_result(self, user: fx.Node, new: fx.Node) -> None:
        with self._graph.inserting_before(user):
            made = self._call(operator.getitem, new, user.args[1], like=user)
        user.replace_all_uses_with(made)
        self._graph.erase_node(user)

    def _bias(self, q: fx.Node, k: fx.Node, mask: fx.Node, like: fx.Node) -> fx.Node:
        """The mask as the kernel takes it: floating point, of full shape, its rows aligned in memory."""
        value, query, key = (node.meta["val"] for node in (mask, q, k))
        call = self._call
        if value.dtype is torch.bool:
            options = {"dtype": query.dtype, "device": query.device}
            zero = call(aten.full.default, [], 0.0, like=like, **options)
            lowest = call(aten.full.default, [], float("-inf"), like=like, **options)
            mask = call(aten.where.self, mask, zero, lowest, like=like)
        length = key.shape[-2]
        if isinstance(length, int) and length % _PADDED:
            missing = _PADDED - length % _PADDED
            mask = call(aten.constant_pad_nd.default, mask, [0, missing], like=like)
            mask = call(aten.slice.Tensor, mask, -1, 0, length, like=like)
        shape = [*query.shape[:-1], length]
        return call(aten.expand.default, mask, shape, like=like)

    def _replace_backward(self, node: fx.Node) -> None:
        grad, q, k, v, out, logsumexp, dropout, causal = node.args[:8]
        forward = _origin(out)
        scale = node.kwargs.get("scale")
        flash = packet(forward) is aten._scaled_dot_product_flash_attention
        saved = self._saved(forward, range(2, 8) if flash else range(2, 4))
        with self._graph.inserting_before(node):
            if flash:
                new = self._call(
                    aten._scaled_dot_product_flash_attention_backward.default,
                    *(grad, q, k, v, out, logsumexp, *saved[:4], dropout, causal, *saved[4:]),
                    like=node,
                    scale=scale,
                )
            else:
                new = self._call(
                    aten._scaled_dot_product_efficient_attention_backward.default,
                    *(grad, q, k, v, forward.args[3], out, logsumexp, *saved, dropout),
                    *([True, True, True, False], causal),
                    like=node,
                    scale=scale,
                )
        set_tag(new, *tags_of(node))
        node.replace_all_uses_with(new)
        self._graph.erase_node(node)

    def _saved(self, forward: fx.Node, results: range) -> list[Any]:
        """Results of the forward operator; known lengths are numbers, unused tensors None."""
        values = forward.meta["val"]
        with self._graph.inserting_before(forward.next):
            return [
                values[index]
                if values[index] is None or isinstance(values[index], int)
                else self._call(operator.getitem, forward, index, like=forward)
                for index in results
            ]

    def _call(self, target: Callable[..., Any], *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
        node = self._graph.call_function(target, args, kwargs)
        node.meta.update({key: value for key, value in like.meta.items() if key not in ("val", KEY)})
        positional, keywords = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self._mode, torch.no_grad():
            node.meta["val"] = target(*positional, **keywords)
        return node


def _origin(result: Any) -> fx.Node:
    """The attention whose result `result` is, or a view of."""
    while packet(result) not in ATTENTION_FORWARD:
        result = argument(result)
    return result  # type: ignore[no-any-return]


def _forward_arguments(node: fx.Node) -> tuple[Any, ...]:
    q, k, v, *rest = node.args
    defaults: list[Any] = [0.0, False]
    dropout, causal = [*rest, *defaults[len(rest) :]][:2]
    return q, k, v, dropout, causal, node.kwargs.get("attn_mask"), node.kwargs.get("scale")
