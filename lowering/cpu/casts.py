"""Casts on CPU: the kernels of ``casts.h`` replace Inductor's loops.

    casts to MXFP8 and MXINT8, decode of all stored formats, of BF16 and FP32     others: Inductor's loops

One kernel casts a matrix along its rows and along its columns, so that it reads the matrix once. When
Inductor lowers the first of the two casts, `cast` makes both results and keeps the second for its node.

Casts of one element type and dtype have the same code, for which a C++ compiler starts once: in place of
results that a cast does not have, the kernel gets empty buffers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch._inductor import ir
from torch._inductor.lowering import empty
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import FloorDiv

from mxcompile.formats import BLOCK, Copy, Format
from mxcompile.lowering.cpu import kernel
from mxcompile.lowering.cpu.kernel import C_TYPES, CppNames
from mxcompile.ops import Spec
from mxcompile.ops.cast import decoded_shape
from mxcompile.ops.view import Cast

_SIDES = ("_rows", "_columns")

Results = list[ir.TensorBox]
"""The results of one operator."""


def _results(copy: Copy, x: ir.TensorBox) -> dict[str, Spec]:
    """Returns shape and dtype of the tensors of `copy` of `x`, by the names of the kernel's pointers."""
    shape = list(x.get_size())
    if copy.dtype is not None:
        return {"values": (shape, copy.dtype)}
    scale_shape = [*shape]
    scale_shape[copy.dim] = FloorDiv(shape[copy.dim] + (BLOCK - 1), BLOCK)
    return {"codes": (shape, copy.elem.dtype), "scales": (scale_shape, torch.uint8)}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Progress:
    """Casts of one graph.

    seen: casts that have results. early: results for nodes that are lowered later. absent: empty buffers in
    place of results, by name and dtype.
    """

    seen: set[fx.Node] = field(default_factory=set)
    early: dict[fx.Node, Results] = field(default_factory=dict)
    absent: dict[tuple[str, torch.dtype], Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredBuffers:
    """A weight [N, k], stored along its rows.

    buffers: codes, scales and the global scale if there is one, from `kernel.stored`. elem: class of
    ``elements.h`` for the elements. rows: whether every row has a global scale.
    """

    buffers: Mapping[str, Any]
    elem: str
    k: Any
    rows: bool

    @staticmethod
    def from_tensors(
        qdata: ir.TensorBox, scale: ir.TensorBox, form: Format, global_scale: ir.TensorBox | None
    ) -> StoredBuffers:
        """Returns the buffers of the weight that the arguments of an operator describe."""
        parts = {"codes": qdata, "scales": scale}
        if global_scale is not None:
            parts["whole"] = global_scale
        size = [] if global_scale is None else global_scale.get_size()
        return StoredBuffers(
            buffers={name: kernel.stored(part) for name, part in parts.items()},
            elem=_elem_class(form),
            k=decoded_shape(qdata.get_size(), -1, form)[-1],
            rows=any(V.graph.sizevars.optimization_hint(length) != 1 for length in size),
        )

    def words(self, words: CppNames) -> str:
        """Returns the weight as a C++ expression of class ``Weight``."""
        codes, scales = words.pointer("codes"), words.pointer("scales")
        whole = f", {words.pointer('whole')}, {int(self.rows)}" if "whole" in self.buffers else ""
        return f"mxcompile::Weight<{self.elem}>{{{codes}, {scales}, {words.size_arguments(self.k)}{whole}}}"


_PROGRESS: WeakKeyDictionary[Any, _Progress] = WeakKeyDictionary()
"""Progress by Inductor's graph."""


def _progress() -> _Progress:
    return _PROGRESS.setdefault(V.graph, _Progress())


def cast(x: ir.TensorBox, copy: Copy) -> Results | None:
    """Returns the tensors of `copy` of `x`; None if Inductor's loops make them."""
    if not has_kernel(copy) or not kernel.takes(x, x.get_dtype()):
        return None
    progress, node = _progress(), V.graph.current_node
    if node in progress.early:
        return progress.early.pop(node)
    progress.seen.add(node)
    other = next(_others(node, copy), None) if copy.dim >= -2 and len(x.get_size()) > 1 else None
    if other is None:
        return _emit(x, [copy])
    sibling, its = other
    results = _emit(x, [copy, its])
    count = len(_results(copy, x))
    progress.seen.add(sibling)
    progress.early[sibling] = results[count:]
    return results[:count]


def has_kernel(copy: Copy) -> bool:
    """Returns whether ``casts.h`` makes `copy` of BF16 and FP32: MXFP8, or blocks of a stored type."""
    form = Format(elem=copy.elem, rounding=copy.format.rounding)
    plain = form.lies_stored and copy == Copy(format=form, dim=copy.dim, dtype=copy.dtype)
    return (plain or copy.is_mx) and not copy.is_tiled and copy.dtype in (None, *C_TYPES)


def _others(node: fx.Node, copy: Copy) -> Iterator[tuple[fx.Node, Copy]]:
    """Yields casts that can share a kernel with `copy`: equal format, along the other matrix dimension."""
    if node is None or copy.is_square:
        return
    source = node.args[0]
    assert isinstance(source, fx.Node)
    for user in source.users:
        view = Cast.from_node(user)
        if user is node or view is None or view.scale is not None or user in _progress().seen:
            continue
        its = view.copy
        dtypes = {its.dtype, copy.dtype} - {None}
        alike = its.format == copy.format and len(dtypes) <= 1
        if alike and its.dim == -3 - copy.dim and has_kernel(its):
            yield user, its


def _emit(x: ir.TensorBox, copies: Sequence[Copy]) -> Results:
    """Returns the tensors of `copies` of `x`, in order; the copies have blocks along different dimensions."""
    outputs = {f"{name}{_side(copy)}": spec for copy in copies for name, spec in _results(copy, x).items()}
    source, first = kernel.stored(x), copies[0]
    value = next((copy.dtype for copy in copies if copy.dtype), source.get_dtype())
    dtypes = {"values": value, "codes": first.elem.dtype, "scales": torch.uint8}
    every = {f"{name}{side}": dtype for side in _SIDES for name, dtype in dtypes.items()}
    absent = {name: _absent(x, name, dtype) for name, dtype in every.items() if name not in outputs}
    sizes = _sizes(list(x.get_size()), copies)

    def body(words: CppNames) -> str:
        elem = f"mxcompile::{first.elem.name.upper()}, mxcompile::Rounding::{first.rounding}"
        cast = f"mxcompile::Cast<{elem}, {C_TYPES[source.get_dtype()]}, {C_TYPES[value]}>"
        wanted = sum((name in outputs) << bit for bit, name in enumerate(every))
        pointers = [", ".join(words.pointer(f"{name}{side}") for name in dtypes) for side in _SIDES]
        results = ", ".join(f"mxcompile::Results<{C_TYPES[value]}>{{{three}}}" for three in pointers)
        arguments = f"{words.pointer('x')}, {words.size_arguments(*sizes)}, {words.threads}"
        square = str(first.is_square).lower()
        return f"{cast}::copies<{square}>({arguments}, {words.size_arguments(wanted)}, {results});"

    return kernel.call("casts.h", body, {"x": source}, outputs, absent)


def _side(copy: Copy) -> str:
    """Returns the end of the names of the results of `copy`."""
    return _SIDES[0] if copy.dim == -1 else _SIDES[1]


def _sizes(shape: list[Any], copies: Sequence[Copy]) -> tuple[Any, Any, Any]:
    """Returns number, length and width of the matrices that the kernel casts."""
    dim = min(copy.dim for copy in copies)
    if dim == -1 and not copies[0].is_square:
        return 1, math.prod(shape[:-1]), shape[-1]
    axis = min(dim, -2) % len(shape)
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def _absent(x: ir.TensorBox, name: str, dtype: torch.dtype) -> Any:
    """Returns the empty buffer that the current graph has in place of results `name` of `dtype`."""
    buffers = _progress().absent
    if (name, dtype) not in buffers:
        buffers[name, dtype] = kernel.stored(empty([0], dtype=dtype, device=x.get_device_or_error()))
    return buffers[name, dtype]


def _elem_class(form: Format) -> str:
    """Returns the class of ``elements.h`` for the elements of stored data."""
    return f"mxcompile::{'NVFP4' if form.two_level else form.elem.name.upper()}"


def decoded(
    qdata: ir.TensorBox,
    scale: ir.TensorBox,
    block_dim: int,
    form: Format,
    dtype: torch.dtype,
    global_scale: ir.TensorBox | None = None,
) -> ir.TensorBox | None:
    """Returns the value of ``mx.decode``; None if Inductor's loops compute it."""
    if not form.lies_stored:
        return None
    shape = decoded_shape(qdata.get_size(), block_dim, form)
    is_tiled = len(scale.get_size()) != len(shape)
    if is_tiled or not kernel.takes(qdata, dtype):
        return None
    dim = block_dim % len(shape)
    if dim == len(shape) - 1 and not (form.two_level and len(shape) != 2):
        weight = StoredBuffers.from_tensors(qdata, scale, form, global_scale)
        return dequantize_part(weight, 0, math.prod(shape[:-1]), dtype, shape)
    if form.two_level:
        return None
    inputs = {"codes": kernel.stored(qdata), "scales": kernel.stored(scale)}

    def body(words: CppNames) -> str:
        sizes = words.size_arguments(math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :]))
        codes, scales, values = map(words.pointer, ("codes", "scales", "values"))
        function = f"mxcompile::dequantize_columns<{_elem_class(form)}>"
        return f"{function}({codes}, {scales}, {sizes}, {words.threads}, {values});"

    return kernel.call("casts.h", body, inputs, {"values": (shape, dtype)})[0]


def dequantize_part(
    weight: StoredBuffers, first: int, count: Any, dtype: torch.dtype, shape: Sequence[Any] | None = None
) -> ir.TensorBox:
    """Returns `count` rows of `weight` from row `first`, in `shape` if given; all parts share one kernel."""

    def body(words: CppNames) -> str:
        part = f"{weight.words(words)}.from({words.size_arguments(first)})"
        return (
            f"mxcompile::dequantize_rows({part}, {words.size_arguments(count)}, {words.threads},"
            f" {words.pointer('values')});"
        )

    values = list(shape or [count, weight.k])
    return kernel.call("casts.h", body, weight.buffers, {"values": (values, dtype)})[0]
