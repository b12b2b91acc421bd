"""Casts on CPU: the kernels of ``casts.h`` in the place of Inductor's loops.

    quantize, quantize_dequantize, dequantize of BF16 and FP32            other dtypes: `inductor.casts`

Casts of one matrix along its rows and along its columns are one kernel, which reads it once: whichever
Inductor lowers first makes the other too, and the other is found here when its turn comes.
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
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import FloorDiv

from mxcompile import ops
from mxcompile.formats import BLOCK, ElemType, Format, Rounding, ScaleLayout, elem_type
from mxcompile.lowering.cpu import kernel
from mxcompile.lowering.cpu.kernel import C_TYPES, CppBody, Words
from mxcompile.ops import Spec
from mxcompile.ops.view import arguments_of

_FLOATS = frozenset({torch.bfloat16, torch.float32})
_RESULTS = ("values", "codes", "scales")

Made = list[ir.TensorBox]
"""The results of one operator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CppCast:
    """One ``quantize`` or ``quantize_dequantize``.

    dim: non-negative. value_dtype: of the values; None for codes and scales.
    """

    dim: int
    elem: ElemType
    rounding: Rounding
    square: bool
    value_dtype: torch.dtype | None

    @staticmethod
    def of(rank: int, arguments: Sequence[Any], *, values: bool) -> CppCast | None:
        """From the operator's arguments after the first, if there is a kernel for it."""
        dim, elem, rounding, *options = arguments
        square = bool(options[0]) if options else False
        last = options[1] if len(options) > 1 else None
        if not values and last not in (None, ScaleLayout.ROW_MAJOR):
            return None
        if values and last not in _FLOATS:
            return None
        return CppCast(
            dim=dim % rank,
            elem=elem_type(elem),
            rounding=Rounding(rounding),
            square=square,
            value_dtype=last if values else None,
        )

    def function(self, source: torch.dtype) -> str:
        """The class of ``casts.h`` whose members cast elements of dtype `source`."""
        words = f"mxcompile::{self.elem.name.upper()}, mxcompile::Rounding::{self.rounding}"
        return f"mxcompile::Cast<{words}, {C_TYPES[source]}, {C_TYPES[self.value_dtype or source]}>"

    def results(self, x: ir.TensorBox) -> dict[str, Spec]:
        """The tensors it makes of `x`, by the names of the kernel's pointers."""
        shape = list(x.get_size())
        if self.value_dtype is not None:
            return {"values": (shape, self.value_dtype)}
        blocks = FloorDiv(shape[self.dim] + (BLOCK - 1), BLOCK)
        scale_shape = [*shape[: self.dim], blocks, *shape[self.dim + 1 :]]
        return {"codes": (shape, self.elem.dtype), "scales": (scale_shape, torch.uint8)}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Progress:
    """Casts of one graph. seen: casts that have results. early: results whose node's turn has not come."""

    seen: set[fx.Node] = field(default_factory=set)
    early: dict[fx.Node, Made] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredBuffers:
    """A weight [N, k], stored along its rows.

    buffers: its codes and scales, and the global scale if there is one, as `kernel.stored` gives them. elem:
    what the headers call its elements. rows: whether every row has a global scale.
    """

    buffers: Mapping[str, Any]
    elem: str
    k: Any
    rows: bool

    @staticmethod
    def of(
        qdata: ir.TensorBox, scale: ir.TensorBox, fmt: str, global_scale: ir.TensorBox | None
    ) -> StoredBuffers:
        """Returns the buffers of the weight that the arguments of an operator describe."""
        parts = {"codes": qdata, "scales": scale}
        if global_scale is not None:
            parts["whole"] = global_scale
        size = [] if global_scale is None else global_scale.get_size()
        return StoredBuffers(
            buffers={name: kernel.stored(part) for name, part in parts.items()},
            elem=elem_word(qdata, fmt),
            k=unpacked_size(qdata, -1, fmt)[-1],
            rows=any(V.graph.sizevars.optimization_hint(length) != 1 for length in size),
        )

    def words(self, words: Words) -> str:
        """The weight as a value of the headers."""
        codes, scales = words.pointer("codes"), words.pointer("scales")
        whole = f", {words.pointer('whole')}, {int(self.rows)}" if "whole" in self.buffers else ""
        return f"mxcompile::Weight<{self.elem}>{{{codes}, {scales}, {words.given(self.k)}{whole}}}"


_PROGRESS: WeakKeyDictionary[Any, _Progress] = WeakKeyDictionary()
"""By Inductor's graph."""


def quantize(x: ir.TensorBox, *arguments: Any) -> tuple[ir.TensorBox, ir.TensorBox] | None:
    """Qdata and scale bytes of ``mx.quantize``; None where Inductor's loops serve."""
    results = _made(x, CppCast.of(len(x.get_size()), arguments, values=False) if _taken(x) else None)
    return None if results is None else (results[0], results[1])


def quantize_dequantize(x: ir.TensorBox, *arguments: Any) -> ir.TensorBox | None:
    """The value of ``mx.quantize_dequantize``; None where Inductor's loops serve."""
    results = _made(x, CppCast.of(len(x.get_size()), arguments, values=True) if _taken(x) else None)
    return None if results is None else results[0]


def _taken(x: ir.TensorBox) -> bool:
    device = x.get_device_or_error()
    return device.type == "cpu" and x.get_dtype() in _FLOATS and kernel.usable()


def _made(x: ir.TensorBox, cast: CppCast | None) -> Made | None:
    if cast is None:
        return None
    progress = _PROGRESS.setdefault(V.graph, _Progress())
    node = V.graph.current_node
    if node in progress.early:
        return progress.early.pop(node)
    progress.seen.add(node)
    last = len(x.get_size()) - 1
    other = next(_others(node, cast, last), None) if cast.dim >= last - 1 else None
    if other is None:
        return _emit(x, {cast.dim: cast})
    sibling, its = other
    results = _emit(x, {cast.dim: cast, its.dim: its})
    count = len(cast.results(x))
    progress.seen.add(sibling)
    progress.early[sibling] = results[count:]
    return results[:count]


def _others(node: fx.Node, cast: CppCast, last: int) -> Iterator[tuple[fx.Node, CppCast]]:
    """Casts of the same tensor along the other of its last two dimensions, alike but for what they give."""
    if node is None or last < 1 or cast.square:
        return
    source = node.args[0]
    assert isinstance(source, fx.Node)
    for user in source.users:
        if user is node or user.target not in (ops.quantize, ops.quantize_dequantize) or user.kwargs:
            continue
        _, *its_arguments = arguments_of(user).values()
        its = CppCast.of(last + 1, its_arguments, values=user.target is ops.quantize_dequantize)
        if its is None or its.dim != 2 * last - 1 - cast.dim or user in _PROGRESS[V.graph].seen:
            continue
        if (its.elem, its.rounding, its.square) != (cast.elem, cast.rounding, False):
            continue
        if None not in (its.value_dtype, cast.value_dtype) and its.value_dtype is not cast.value_dtype:
            continue
        yield user, its


def _emit(x: ir.TensorBox, casts: dict[int, CppCast]) -> list[ir.TensorBox]:
    """All results of `casts`, of one tensor by dimension, in order."""
    shape = list(x.get_size())
    last = len(shape) - 1
    outputs = {
        f"{name}{last - dim}": spec for dim, cast in casts.items() for name, spec in cast.results(x).items()
    }
    source = kernel.stored(x)

    def body(words: Words) -> str:
        return _body(shape, source.get_dtype(), casts, words)

    code = CppBody(header="casts.h", body=body)
    return kernel.call(code, {"x": source}, outputs, x.get_device_or_error())


def _body(shape: list[Any], source: torch.dtype, casts: dict[int, CppCast], words: Words) -> str:
    """The call of ``Cast<…>::rows`` or ``matrices``."""
    cast = next((each for each in casts.values() if each.value_dtype), next(iter(casts.values())))
    results = f"mxcompile::Results<{C_TYPES[cast.value_dtype or source]}>"
    function = cast.function(source)
    last = len(shape) - 1

    def pointers(dim: int, *names: str) -> str:
        wanted = (words.pointer(f"{n}{last - dim}") if n in names else "nullptr" for n in _RESULTS)
        return f"{results}{{{', '.join(wanted)}}}"

    x, threads = words.pointer("x"), words.threads
    dim = min(casts)  # of two the one along columns
    if dim == last and not cast.square:
        sizes = words.given(math.prod(shape[:-1]), shape[-1])
        return f"{function}::rows({x}, {sizes}, {threads}, {pointers(last, *_RESULTS)});"
    down, along = pointers(dim, *_RESULTS), pointers(last, *_RESULTS) if len(casts) > 1 else pointers(last)
    if dim == last:  # a square tile's elements are those along columns, its scales those along rows
        down, along, dim = pointers(last, "values", "codes"), pointers(last, "scales"), last - 1
    sizes = words.given(math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :]))
    square = str(cast.square).lower()
    return f"{function}::matrices<{square}>({x}, {sizes}, {threads}, {down}, {along});"


def elem_word(qdata: ir.TensorBox, fmt: str) -> str:
    """The class of ``elements.h`` for the elements of stored data. fmt: as for ``mx.dequantize``."""
    if fmt and Format.of(fmt).two_level:
        return "mxcompile::NVFP4"
    elem = Format.of(fmt).elem if fmt else elem_type(qdata.get_dtype())
    return f"mxcompile::{elem.name.upper()}"


def unpacked_size(qdata: ir.TensorBox, dim: int, fmt: str) -> list[Any]:
    """The shape of the values of stored data, whose bytes hold several elements along `dim`."""
    shape = list(qdata.get_size())
    if fmt:
        shape[dim] = shape[dim] * Format.of(fmt).elem.per_byte
    return shape


def dequantize(
    qdata: ir.TensorBox,
    scale: ir.TensorBox,
    block_dim: int,
    dtype: torch.dtype,
    fmt: str = "",
    global_scale: ir.TensorBox | None = None,
) -> ir.TensorBox | None:
    """The value of ``mx.dequantize``; None where Inductor's loops serve."""
    shape, device = unpacked_size(qdata, block_dim, fmt), qdata.get_device_or_error()
    if device.type != "cpu" or dtype not in _FLOATS or not kernel.usable():
        return None
    if len(scale.get_size()) != len(shape):  # tiled
        return None
    dim = block_dim % len(shape)
    two_level = bool(fmt) and Format.of(fmt).two_level
    if dim == len(shape) - 1 and not (two_level and len(shape) != 2):
        weight = StoredBuffers.of(qdata, scale, fmt, global_scale)
        return dequantize_part(weight, 0, math.prod(shape[:-1]), dtype, shape)
    if two_level:
        return None
    elem = elem_word(qdata, fmt)
    inputs = {"codes": kernel.stored(qdata), "scales": kernel.stored(scale)}

    def body(words: Words) -> str:
        sizes = words.given(math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :]))
        pointers = f"{words.pointer('codes')}, {words.pointer('scales')}"
        function = f"mxcompile::dequantize_columns<{elem}>"
        return f"{function}({pointers}, {sizes}, {words.threads}, {words.pointer('values')});"

    code = CppBody(header="casts.h", body=body)
    return kernel.call(code, inputs, {"values": (shape, dtype)}, device)[0]


def dequantize_part(
    weight: StoredBuffers, first: int, count: Any, dtype: torch.dtype, shape: Sequence[Any] | None = None
) -> ir.TensorBox:
    """Values of `count` rows of `weight` from `first` on, of `shape` if given; all parts share the code."""

    def body(words: Words) -> str:
        part = f"{weight.words(words)}.from({words.given(first)})"
        return (
            f"mxcompile::dequantize_rows({part}, {words.given(count)}, {words.threads},"
            f" {words.pointer('values')});"
        )

    code = CppBody(header="casts.h", body=body)
    device = weight.buffers["codes"].get_device_or_error()
    values = list(shape or [count, weight.k])
    return kernel.call(code, weight.buffers, {"values": (values, dtype)}, device)[0]
