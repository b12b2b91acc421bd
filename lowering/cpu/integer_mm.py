"""``mx.matmul`` of two matrices in MXINT8 on CPU: the kernel of ``integer_mm.h``.

    out = a [M, K] · b [K, N] (+ bias)

Each operand is contiguous, or its transpose is. The strides of the graph's fake tensors are read, because
Inductor may not have chosen strides yet. `graph.integer` chooses these products by the name of the kernel in
their tags. Others get here where plain Inductor compiles a backward under compiled autograd. A bias that is
not a vector is added after the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from torch._inductor import ir
from torch._inductor.lowering import permute
from torch._inductor.virtualized import V

from mxcompile.graph.tags import lies_in_order, tags_of, value_of
from mxcompile.lowering.cpu import kernel
from mxcompile.lowering.cpu.kernel import CppNames
from mxcompile.ops.view import Product

KERNEL = "mx_integer_mm C++"
"""How records name the kernel, before its instructions."""


def lower_matmul(
    a: ir.TensorBox,
    scale_a: ir.TensorBox,
    b: ir.TensorBox,
    scale_b: ir.TensorBox,
    bias: ir.TensorBox | None,
    out_dtype: torch.dtype,
    format_a: str,
    format_b: str,
    tensors: Sequence[ir.TensorBox] | None = None,
) -> ir.TensorBox | None:
    """Lowers a product that `graph.integer` chose to the C++ kernel. Returns None for other products."""
    if not any(tag.kernel.startswith(KERNEL) for tag in tags_of(V.graph.current_node)):
        return None
    (m, k), n = a.get_size(), b.get_size()[1]
    across = _across(V.graph.current_node)
    parts = dict(zip("xs", _laid_out((a, scale_a), transposed=across[0]), strict=True))
    parts |= dict(zip("wt", _laid_out((b, scale_b), transposed=not across[1]), strict=True))
    inputs = {name: kernel.stored(part) for name, part in parts.items()}

    def body(words: CppNames) -> str:
        x, s, w, t = (words.pointer(name) for name in ("x", "s", "w", "t"))
        sides = zip((x, w), (s, t), (m, n), across, strict=True)
        rows = (
            f"mxcompile::Codes{{{codes}, {scales}, {words.size_arguments(size, k)}, {int(strided)} != 0}}"
            for codes, scales, size, strided in sides
        )
        tail = f"{words.optional('bias')}, {words.threads}, {words.pointer('out')}"
        return f"mxcompile::integer_mm({', '.join(rows)}, {tail});"

    return kernel.product("integer_mm.h", body, inputs, bias, [m, n], out_dtype)


def _across(node: fx.Node) -> tuple[bool, bool]:
    """Returns for each operand of the product `node` whether codes along K are strided in memory."""
    product = Product.read(node)
    return not lies_in_order(value_of(product.a)), lies_in_order(value_of(product.b))


def _laid_out(side: Sequence[ir.TensorBox], *, transposed: bool) -> Sequence[ir.TensorBox]:
    return [permute(part, [1, 0]) for part in side] if transposed else side
