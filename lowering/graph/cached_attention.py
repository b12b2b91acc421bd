"""cached_attention: attention of few queries reads a cache as it is stored: MXFP8, MXINT8, BF16, FP32.

    attention(q, decode(k, sk), decode(v, sv), mask)  → permute(mx.attention(q, k, sk, v, sv, mask))
    attention(q, k, v, mask), on CPUs                 → permute(mx.attention(q, k, None, v, None, mask))

The pass also matches k and v that were repeated for the heads that share them. With few queries, reading k
and v takes most of the time. So the kernel reads their codes, half the bytes of BF16, once, and decodes them
in registers (`cpu.attention`, `templates.cached_attention`). For more queries and in other forms of attention
k and v are dequantized, and the record has the reason. In graphs with quantized operands, the CPU kernel also
replaces attention of few queries over many unquantized keys, because PyTorch's kernel reads a copy of k and v
for each head that shares them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from mxcompile import ops
from mxcompile.formats import Format, stored_precision
from mxcompile.graph.attention import ATTENTION_FORWARD
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import SIZED_VIEWS, TRANSPARENT, argument, aten, packet
from mxcompile.graph.tags import Kind, hint, lies_in_order, set_tag, tags_of, tensor, value_of
from mxcompile.lowering.choices.attention_forms import MOST_DIMS, form
from mxcompile.lowering.cpu import MOST_ROWS
from mxcompile.lowering.graph.lowering_pass import LoweringPass, Reasons
from mxcompile.ops.view import Dequantize, argument_of, arguments_of

_FLOATS = (torch.bfloat16, torch.float32)
_DEQUANTIZED = "keys and values dequantized"
_LEAST_KEYS = 64
"""Least number of keys in FP32 or BF16 for which the CPU kernel replaces PyTorch's."""


class CachedAttention(LoweringPass):
    """Makes attention read a quantized cache, on all targets. Without a kernel, records get the reason."""

    templates = ("templates.cached_attention",)
    in_cpp = True

    @property
    def obstacle(self) -> str:
        """The reason why no kernel can read the codes of a cache, or ""."""
        has_kernels = self.target.device == "cpu" or self.target.arch is not None
        reason = super().obstacle if has_kernels else f"no kernel for {self.target.name} reads codes"
        return f"{_DEQUANTIZED}: {reason}" if reason else ""

    def candidates(self, graph: fx.Graph) -> Iterator[fx.Node]:
        """Yields the attentions that read a quantized cache."""
        for node in list(graph.nodes):
            if packet(node) in ATTENTION_FORWARD:
                operands = [argument(node, index) for index in (1, 2)]
            elif any(tag.kind is not Kind.LINEAR for tag in tags_of(node)):
                operands = [operand for operand in node.all_input_nodes if tensor(operand) is not None]
            else:
                continue
            if any(map(_cached, operands)):
                yield node

    def apply(self, graph: fx.Graph) -> Reasons:
        """Replaces the attentions that the kernel supports. Returns the reasons why others stay."""
        build, reasons = Builder(graph, self.name), {}
        for node in self.candidates(graph):
            if reason := self._reason(node):
                reasons[node] = f"{_DEQUANTIZED}: {reason}"
            else:
                self._replace(node, build)
        # without mx operators, results stay bit-equal to Inductor's
        if any(packet(node) in ops.CASTS | ops.PRODUCTS for node in graph.nodes):
            for node in [node for node in graph.nodes if self._takes_plain(node)]:
                self._replace(node, build)
        return reasons

    def _takes_plain(self, node: fx.Node) -> bool:
        """Whether the CPU kernel runs `node`, whose keys and values have the dtype of its queries."""
        if self.target.device != "cpu" or packet(node) not in ATTENTION_FORWARD:
            return False
        if any(value_of(argument(node, index)).ndim != 4 for index in range(3)) or self._reason(node):
            return False
        query, sides = value_of(argument(node, 0)), [value_of(part[0]) for part in _parts(node) or ()]
        return all(
            side.dtype is query.dtype and lies_in_order(side) and hint(side.shape[2]) >= _LEAST_KEYS
            for side in sides
        )

    def _reason(self, node: fx.Node) -> str:
        """Returns the reason why the kernel does not support `node`, an attention over a cache, or ""."""
        on_cpu = self.target.device == "cpu"
        row = ATTENTION_FORWARD.get(packet(node))
        if row is None:
            return "scores and values are separate products"
        if row.device != self.target.device:
            return f"a form of attention, {packet(node)}, that has no kernel"
        query = value_of(argument(node, 0))
        if hint(query.shape[2]) > MOST_ROWS:
            return f"{hint(query.shape[2])} queries, the kernel takes up to {MOST_ROWS}"
        if query.dtype not in (_FLOATS if on_cpu else _FLOATS[:1]):
            return f"queries in {query.dtype}"
        if not on_cpu and query.shape[3] > MOST_DIMS:
            return f"head_dim {query.shape[3]}, the kernel takes up to {MOST_DIMS}"
        return _form_obstacle(node, query)

    def _replace(self, node: fx.Node, build: Builder) -> None:
        query, parts = argument(node), _parts(node)
        assert parts is not None
        (keys, key_scales, fmt), (values, value_scales, _) = parts
        factor: Any = node.kwargs.get("scale")
        factor = float(value_of(query).shape[3]) ** -0.5 if factor is None else factor
        with build.graph.inserting_before(node):
            arguments = (query, keys, key_scales, values, value_scales, _mask(node), factor, fmt)
            new_node = build.call(ops.attention, *arguments, like=node)
            name = self._kernel(value_of(query), value_of(keys), fmt)
            set_tag(new_node, *(replace(tag, kernel=name) for tag in tags_of(node)))
            result = build.call(aten.permute.default, new_node, [0, 2, 1, 3], like=node)
        for user in list(node.users):
            if user.args[1:] == (0,):
                user.replace_all_uses_with(result)
            build.graph.erase_node(user)
        build.graph.erase_node(node)  # attention may have dropout, so dead code elimination would keep it

    def _kernel(self, query: torch.Tensor, keys: torch.Tensor, fmt: str) -> str:
        """Returns the name of the kernel for `query` over `keys` in the format `fmt`."""
        dtype = str(keys.dtype).removeprefix("torch.")
        stored = f"(keys and values {stored_precision(Format.parse(fmt)) if fmt else dtype})"
        if self.target.device == "cpu":
            return f"mx_attention C++ {stored}"
        batch, heads, queries, dim = map(hint, query.shape)
        kv_heads, length = map(hint, keys.shape[1:3])
        chosen = form(batch * kv_heads, heads * queries // kv_heads, length, dim, self.target)
        return f"mx_attention {chosen} {stored}"


def _form_obstacle(node: fx.Node, query: torch.Tensor) -> str:
    """Returns the feature of the attention `node` that the kernel does not support, or ""."""
    arguments = arguments_of(node)
    if arguments.get("dropout_p") or arguments.get("is_causal"):
        return "it has dropout" if arguments.get("dropout_p") else "it is causal without a mask"
    if any(user.users and user.args[1:] != (0,) for user in node.users):
        return "more than its first result is read"
    parts = _parts(node)
    if parts is None:
        return "it reads a part of the cache, or values computed from it"
    (_, _, key_format), (_, _, value_format) = parts
    if key_format != value_format:
        return f"keys in {key_format}, values in {value_format}"
    shapes = [value_of(part[0]).shape for part in parts]
    if shapes[0] != shapes[1] or shapes[0][3] != query.shape[3] or hint(shapes[0][2]) == 0:
        return "sizes of keys, values and queries differ"
    mask = _mask(node)
    value = None if mask is None else tensor(mask)
    if value is not None and (
        value.dtype not in _FLOATS or value.ndim > 4 or value.shape[-1] != shapes[0][2]
    ):
        return f"a mask of {value.dtype}, {tuple(value.shape)}"
    return ""


_Parts = tuple[fx.Node, fx.Node | None, str]
"""Codes (possibly as bytes), scales, and the name of their format; or values, None and ""."""


def _parts(node: fx.Node) -> list[_Parts] | None:
    """Returns the parts of the keys and of the values of `node`; None if the kernel cannot read both."""
    sides = [argument(node, index) for index in (1, 2)]
    if not any(map(_cached, sides)):
        return [(_unrepeated(side), None, "") for side in sides]
    cached = [part for side in sides if (part := _cached_parts(side)) is not None]
    return cached if len(cached) == 2 else None


def _cached_parts(node: fx.Node) -> _Parts | None:
    """Returns the codes and scales that `node` decodes, and may repeat for shared heads; else None."""
    dequantize = Dequantize.from_node(_unrepeated(node))
    if dequantize is None or dequantize.form.packed:
        return None
    codes, scales = dequantize.qdata, dequantize.scale
    elements, scale = tensor(codes), tensor(scales)
    if elements is None or scale is None or elements.ndim != 4 or scale.ndim != 4:
        return None
    if dequantize.block_dim not in (-1, 3):
        return None
    if codes.target is aten.view.dtype and value_of(argument(codes)).dtype is torch.uint8:
        return argument(codes), scales, dequantize.fmt
    return codes, scales, dequantize.fmt


def _unrepeated(node: fx.Node) -> fx.Node:
    """Returns [B, KV, T, D] if `node` [B, KV·n, T, D] repeats each head n times in turn; else `node`."""
    if packet(node) not in SIZED_VIEWS:
        return node
    expanded = argument(node)
    while packet(expanded) is aten.clone:
        expanded = argument(expanded)
    if packet(expanded) is not aten.expand or packet(argument(expanded)) is not aten.unsqueeze:
        return node
    unsqueezed = argument(expanded)
    source, wide, result = tensor(argument(unsqueezed)), tensor(expanded), tensor(node)
    if argument_of(unsqueezed, "dim") not in (2, -3) or source is None or wide is None or result is None:
        return node
    batch, heads, length, dim = source.shape if source.ndim == 4 else (0, 0, 0, 0)
    same = wide.shape[:2] == (batch, heads) and wide.shape[3:] == (length, dim)
    same = same and result.shape == (batch, heads * wide.shape[2], length, dim)
    return argument(unsqueezed) if same else node


def _cached(node: fx.Node) -> bool:
    """Whether `node` is dequantized MX data or a view of it."""
    while packet(node) in TRANSPARENT and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return Dequantize.from_node(node) is not None


def _mask(node: fx.Node) -> fx.Node | None:
    """Returns the mask that attention adds to the scores, without its expansion to all heads and queries."""
    arguments = arguments_of(node)
    mask = arguments.get("attn_mask", arguments.get("attn_bias"))
    while isinstance(mask, fx.Node) and packet(mask) is aten.expand:
        value = tensor(argument(mask))
        if value is None or value.shape[-1] != value_of(mask).shape[-1]:
            break
        mask = argument(mask)
    return mask if isinstance(mask, fx.Node) else None
