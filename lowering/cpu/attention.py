"""``mx.attention`` on CPU: the kernel of ``attention.h``.

out [B, Q, H, D] = softmax(factor · q · kᵀ + mask) · v    q: BF16 or FP32. k, v: codes and scales, or as q
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch._inductor import ir
from torch._inductor.virtualized import V

from mxcompile.formats import Format
from mxcompile.lowering.cpu import kernel
from mxcompile.lowering.cpu.kernel import C_TYPES, CppNames


def lower_attention(
    q: ir.TensorBox,
    keys: ir.TensorBox,
    key_scales: ir.TensorBox | None,
    values: ir.TensorBox,
    value_scales: ir.TensorBox | None,
    mask: ir.TensorBox | None,
    factor: float,
    fmt: str,
) -> ir.TensorBox | None:
    """Returns the result of ``mx.attention``; None for other devices and dtypes."""
    if not kernel.takes(q, *(x.get_dtype() for x in (q, mask) if x is not None)):
        return None
    batch, heads, queries, dim = q.get_size()
    kv_heads, length = keys.get_size()[1:3]
    equal = V.graph.sizevars.statically_known_equals
    if mask is not None and equal(mask.get_size()[-1], 1) and not equal(length, 1):
        return None  # the kernel reads a number of the mask for each key
    parts = {"q": q, "keys": keys, "key_scales": key_scales, "values": values, "value_scales": value_scales}
    if not fmt:
        parts = {"q": q, "keys": keys, "values": values}
    inputs = {
        name: kernel.stored(value) for name, value in (parts | {"mask": mask}).items() if value is not None
    }
    elem = f"mxcompile::{Format.parse(fmt).elem.name.upper()}" if fmt else C_TYPES[q.get_dtype()]
    function = f"{'attention' if fmt else 'dense_attention'}<{elem}>"
    strides = (0, 0, 0) if mask is None else _strides(mask.get_size())

    def body(words: CppNames) -> str:
        pointers = [*map(words.pointer, parts), words.optional("mask")]
        sizes = words.size_arguments(batch, heads, kv_heads, queries, length, dim, *strides)
        problem = f"mxcompile::Attention{{{sizes}, static_cast<float>({float(factor)!r})}}"
        arguments = ", ".join([*pointers, problem, words.threads, words.pointer("out")])
        return f"mxcompile::{function}({arguments});"

    out = [batch, queries, heads, dim], q.get_dtype()
    return kernel.call("attention.h", body, inputs, {"out": out})[0]


def _strides(shape: Sequence[Any]) -> tuple[Any, ...]:
    """Returns strides of a contiguous mask over sequences, heads and queries; 0 for a broadcast dimension."""
    batch, heads, queries, length = (1,) * (4 - len(shape)) + tuple(shape)
    steps = (batch, heads * queries * length), (heads, queries * length), (queries, length)
    return tuple(0 if size == 1 else step for size, step in steps)
