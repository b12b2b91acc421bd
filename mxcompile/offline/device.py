"""Moves a graph that was traced on fake CPU tensors to a GPU, before passes see it.

Torch builds without GPU support have no autograd on GPU tensors, even if these are fake. A model is therefore
traced on the CPU, and its joint graph is moved: every value, every device argument, and the attention
operators, which differ between CPU and GPU.

    CPU attention   →   efficient attention with a mask; else cuDNN or flash attention

PyTorch prefers cuDNN on compute capability 9.0, 10.0 and 10.3 if cuDNN is newer than 9.15, as in its builds
for CUDA 13 (`check_prefer_cudnn_attention` in ATen's ``native/transformers/cuda/sdp_utils.cpp``).

Scalar constants stay on the CPU, as in the graph of a model on a GPU.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from mxcompile.errors import OptionError, not_allowed
from mxcompile.graph.attention import ATTENTION_BACKWARD, ATTENTION_FORWARD, BACKENDS
from mxcompile.graph.opsets import argument, aten, packet
from mxcompile.graph.tags import KEY, set_tag, tags_of
from mxcompile.lowering.targets import Target
from mxcompile.ops.view import argument_of, arguments_of, results_of

_PADDED = 16  # elements; kernels require this alignment of a mask's rows

CUDNN, FLASH = "cudnn", "flash"
"""Backends of attention without a mask."""

_CUDNN_HEAD = 128


def attention_backend(target: Target, name: str = "auto") -> str:
    """Returns the requested backend of attention, by default PyTorch's choice. Raises `OptionError`."""
    allowed = ("auto", FLASH, *([] if isinstance(target.arch, str) else [CUDNN]))
    if name not in allowed:
        raise OptionError(not_allowed("attention", name, allowed))
    if name != "auto":
        return name
    return CUDNN if target.prefers_cudnn else FLASH


def move(graph: fx.Graph, device: torch.device, attention: str = FLASH) -> None:
    """Moves `graph` from the CPU to `device`, a GPU. attention: backend of attention without a mask."""
    mode = detect_fake_mode([node.meta.get("val") for node in graph.nodes])
    if mode is None:
        return

    def on_device(argument: Any) -> Any:
        is_cpu = isinstance(argument, torch.device) and argument.type == "cpu"
        return device if is_cpu else argument

    def moved(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, FakeTensor) or tensor.device.type != "cpu":
            return tensor
        with mode, torch.no_grad():
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    for node in graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map_only(Tensor, moved, node.meta["val"])
        node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), on_device)
    _Attention(graph, mode, attention).replace()
    graph.lint()


def attention_flops(node: fx.Node) -> float:
    """Returns the FLOPs of an attention kernel: half of each product if causal; scores again in backward."""
    tags = tags_of(node)
    factor = 1.25 if packet(node) in ATTENTION_BACKWARD else 1.0
    half = 0.5 if arguments_of(node).get("is_causal") else 1.0
    return half * factor * sum(tag.flops for tag in tags)


@dataclass(frozen=True, slots=True)
class _Attention:
    """Replaces the CPU's attention operators with GPU operators."""

    graph: fx.Graph
    mode: FakeTensorMode
    backend: str

    def replace(self) -> None:
        """Replaces all attention operators; each backward reads the saved results of its new forward."""
        cpu = BACKENDS["cpu"]
        for old, replaced in ((cpu.forward, self._replace_forward), (cpu.backward, self._replace_backward)):
            for node in list(self.graph.nodes):
                if packet(node) is old:
                    replaced(node)

    def _replace_forward(self, node: fx.Node) -> None:
        names = ("query", "key", "value", "dropout_p", "is_causal", "attn_mask", "scale")
        q, k, v, dropout, causal, mask, scale = (argument_of(node, name) for name in names)
        arguments: tuple[Any, ...]
        with self.graph.inserting_before(node):
            if mask is not None:
                backend = "efficient"
                arguments = (self._bias(q, k, mask, node), True, dropout, causal)
            elif self.backend == CUDNN and _fits_cudnn(q):
                backend = CUDNN
                arguments = (None, True, dropout, causal, False)
            else:
                backend = FLASH
                arguments = (dropout, causal, False)
            target = BACKENDS[backend].forward.default
            new = self._call(target, q, k, v, *arguments, like=node, scale=scale)
        set_tag(new, *tags_of(node))
        for index, user in list(results_of(node)):
            with self.graph.inserting_before(user):
                item = self._call(operator.getitem, new, index, like=user)
            user.replace_all_uses_with(item)
            self.graph.erase_node(user)
        self.graph.erase_node(node)

    def _bias(self, q: fx.Node, k: fx.Node, mask: fx.Node, like: fx.Node) -> fx.Node:
        """Returns the mask as the kernel needs it: floating point, expanded, with aligned rows."""
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
        forward: Any = out
        while packet(forward) not in ATTENTION_FORWARD:  # `out` is a view of its first result
            forward = argument(forward)
        scale = node.kwargs.get("scale")
        row = ATTENTION_FORWARD[packet(forward)]
        saved = self._saved(forward, range(2, 4) if row.backend == "efficient" else range(2, 8))
        tensors = (grad, q, k, v)
        with self.graph.inserting_before(node):
            arguments: tuple[Any, ...]
            match row.backend:
                case "efficient":
                    bias, mask = argument_of(forward, "attn_bias"), [True, True, True, False]
                    arguments = (bias, out, logsumexp, *saved, dropout, mask, causal)
                case "cudnn":
                    arguments = (out, logsumexp, *saved[4:], None, *saved[:4], dropout, causal)
                case _:
                    arguments = (out, logsumexp, *saved[:4], dropout, causal, *saved[4:])
            new = self._call(row.backward.default, *tensors, *arguments, like=node, scale=scale)
        set_tag(new, *tags_of(node))
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)

    def _saved(self, forward: fx.Node, results: range) -> list[Any]:
        """Returns results of the forward operator; fixed lengths as ints, unused tensors as None."""
        values = forward.meta["val"]
        with self.graph.inserting_before(forward.next):
            return [
                values[index]
                if values[index] is None or isinstance(values[index], int)
                else self._call(operator.getitem, forward, index, like=forward)
                for index in results
            ]

    def _call(self, target: Callable[..., Any], *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update({key: value for key, value in like.meta.items() if key not in ("val", KEY)})
        positional, keywords = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode, torch.no_grad():
            node.meta["val"] = target(*positional, **keywords)
        return node


def _fits_cudnn(q: fx.Node) -> bool:
    value = q.meta["val"]
    head = value.shape[-1]
    halves = (torch.bfloat16, torch.float16)
    return value.dtype in halves and isinstance(head, int) and head <= _CUDNN_HEAD and head % 8 == 0
