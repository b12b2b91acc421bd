"""Matrix products inside operators that passes cannot decompose: sizes derived from operands.

    recurrent and fused layers   every weight matrix [a, b] times all rows of the input: 2·rows·a·b FLOPs
    _trilinear                   one multiply-add for every element of the three broadcast operands
    others                       a formula registered with `torch.utils.flop_counter`, if there is one; else
                                 x[…, k], w[n, k] or [k, n] → y[…, n] counts as a product of these shapes,
                                 and x[…, k], w[n, k] → loss as a head with its loss

All other operators have unknown FLOPs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from mxcompile.graph.opsets import OPAQUE, aten, matrices_in_code, packet
from mxcompile.graph.shapes import gradient_sizes
from mxcompile.graph.tags import UNKNOWN, Sizes, tensor
from mxcompile.ops.view import arguments_of


def opaque_sizes(node: fx.Node) -> list[Sizes]:
    """Returns the sizes of the products inside an opaque operator; `UNKNOWN` if they cannot be derived."""
    op_packet = packet(node)
    if op_packet is aten._trilinear:
        return [_trilinear_sizes(node)]
    if op_packet in OPAQUE:
        return weights_sizes(node.target, tree_map(_value, node.args)) or [UNKNOWN]
    if (formula := flop_registry.get(op_packet)) is None:
        return _head_with_loss(node) or [_by_shapes(node)]
    args, kwargs = tree_map(_value, (node.args, node.kwargs))
    return [(1, formula(*args, **kwargs, out_val=node.meta.get("val")) // 2, 1, 1)]


def sizes_by_weight(sizes: list[Sizes], weights: Sequence[Tensor]) -> list[Sizes]:
    """Returns the sizes of the products inside an operator, one for each of `weights`.

    sizes: result of `opaque_sizes`. A single total is divided as if every weight multiplied the same rows.
    """
    total = sizes[0][1] if len(sizes) == 1 and sizes[0][2:] == (1, 1) else None
    if total is None:
        return sizes if len(sizes) == len(weights) else [UNKNOWN] * len(weights)
    rows, rest = divmod(total, sum(math.prod(weight.shape) for weight in weights))
    if rest:
        return [UNKNOWN] * len(weights) if len(weights) > 1 else sizes
    return [(math.prod(weight.shape[:-2]), rows, *weight.shape[-2:]) for weight in weights]


def _head_with_loss(node: fx.Node) -> list[Sizes]:
    """Returns the sizes of x·wᵀ and of the returned gradients if `node` returns a loss, else []."""
    matrices, value = _matrices(node), node.meta.get("val")
    results = [list(map(str, leaf.shape)) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    if len(matrices) != 2 or len(matrices[1]) != 2 or not results:
        return []
    x, w = matrices
    shapes = list(map(str, x)), list(map(str, w))
    if shapes[0][-1] != shapes[1][-1] or results[0] not in ([], shapes[0][:-1]):
        return []
    product: Sizes = (1, math.prod(x[:-1]), w[0], w[1])
    gradients = zip(gradient_sizes(product), shapes, strict=True)
    return [product, *(sizes for sizes, shape in gradients if shape in results[1:])]


def _matrices(node: fx.Node) -> list[list[Any]]:
    """Returns the shapes of floating-point operands above one dimension and of `matrices_in_code`."""
    values = [value for value in map(tensor, node.all_input_nodes) if value is not None]
    values += matrices_in_code(node.target)
    return [list(value.shape) for value in values if value.is_floating_point() and value.ndim > 1]


def _by_shapes(node: fx.Node) -> Sizes:
    """Returns the sizes of the product that fits the shapes of operands and result, batched or not."""
    matrices = _matrices(node)
    result = node.meta.get("val")
    if len(matrices) != 2 or not isinstance(result, Tensor) or result.ndim < 2:
        return UNKNOWN
    x, w = matrices
    *rows, n = result.shape
    batch: Any = 1
    if len(w) == 3 and len(x) == 3 and w[0] == x[0]:
        batch = w.pop(0)
        rows, x = rows[1:], x[1:]
    if len(w) != 2 or rows != x[:-1] or [n, x[-1]] not in (w, w[::-1]):
        return UNKNOWN
    return batch, math.prod(rows), n, x[-1]


def _value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument


def _trilinear_sizes(node: fx.Node) -> Sizes:
    """Returns Σ a·b·c as a product: k is the number of summed elements, m the number of results."""
    arguments = arguments_of(node)
    shapes = []
    for number in "123":
        if (value := tensor(arguments[f"i{number}"])) is None:
            return UNKNOWN
        shape = list(value.shape)
        for dim in sorted(arguments[f"expand{number}"]):
            shape.insert(dim, 1)
        shapes.append(shape)
    m, k = 1, 1
    for dim, lengths in enumerate(zip(*shapes, strict=True)):
        length = next((size for size in lengths if not isinstance(size, int) or size != 1), 1)
        if dim in arguments["sumdim"]:
            k = k * length
        else:
            m = m * length
    return 1, m, 1, k


def weights_sizes(target: Any, args: Sequence[Any]) -> list[Sizes]:
    """Returns the products inside an operator call: each weight matrix times all rows of the first argument.

    A backward call has two products for each weight. Fused attention layers have two more: q·kᵀ, softmax·v.
    """
    schema = getattr(target, "_schema", None)
    x = args[0]
    if schema is None or not isinstance(x, Tensor) or x.ndim < 2:
        return []
    named = zip(schema.arguments, args, strict=False)
    weights = [value for argument, value in named if "weight" in argument.name or argument.name == "params"]
    matrices = [leaf for leaf in tree_leaves(weights) if isinstance(leaf, Tensor) and leaf.ndim == 2]
    rows = math.prod(x.shape[:-1])
    sizes: list[Sizes] = [(1, rows, matrix.shape[0], matrix.shape[1]) for matrix in matrices]
    if "backward" in schema.name:
        return [product for size in sizes for product in gradient_sizes(size)]
    if x.ndim == 3 and ("encoder_layer" in schema.name or "attention" in schema.name):
        batch, length, width = x.shape
        sizes += [(batch, length, length, width), (batch, length, width, length)]
    return sizes
