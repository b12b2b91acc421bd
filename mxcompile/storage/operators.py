"""The operators that keep the blocks of an `MXTensor` whole: they act on elements and scales alike.

    f(MX(q, s)) = MX(f(q), f(s))       moves, copies, transposes, rows, views that leave the blocked
                                       dimension alone
    f(MX(q, s)) = f(dequantize(q, s))  every other operator

A slice along the blocked dimension is one of the first kind where it starts and ends with a block: elements
that share a byte are neighbours along that dimension. Nothing may change an `MXTensor` in place but `copy_`,
which quantizes what is not in its format yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mxcompile.formats import BLOCK, num_blocks
from mxcompile.formats.encoding import encode_stored
from mxcompile.storage.handlers import handles
from mxcompile.storage.tensor import MXTensor, dense

aten = torch.ops.aten


@handles(
    aten.detach.default, aten.alias.default, aten.clone.default, aten.lift_fresh.default,
    aten._pin_memory.default,
)  # fmt: skip
def _same(func: Any, x: MXTensor, *args: Any, **kwargs: Any) -> MXTensor:
    return x.with_parts(lambda part: func(part, *args, **kwargs))


@handles(aten.is_pinned.default)
def _is_pinned(func: Any, x: MXTensor, *args: Any, **kwargs: Any) -> bool:
    return bool(func(x.qdata, *args, **kwargs))


@handles(aten._to_copy.default, aten.empty_like.default)
def _moved(func: Any, x: MXTensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    """On another device, or standing for values in another floating-point dtype."""
    dtype = x.dtype if dtype is None else dtype
    if not dtype.is_floating_point or dtype.itemsize < 2:
        return NotImplemented
    return x.with_parts(lambda part: func(part, **kwargs)).with_dtype(dtype)


@handles(aten.t.default)
def _t(func: Any, x: MXTensor) -> MXTensor:
    return x.with_parts(func, x.ndim - 1 - x.block_dim % x.ndim)


@handles(aten.transpose.int)
def _transpose(func: Any, x: MXTensor, first: int, second: int) -> MXTensor:
    first, second, dim = first % x.ndim, second % x.ndim, x.block_dim % x.ndim
    return x.with_parts(lambda part: func(part, first, second), {first: second, second: first}.get(dim, dim))


@handles(aten.permute.default)
def _permute(func: Any, x: MXTensor, order: Sequence[int]) -> MXTensor:
    dims = [dim % x.ndim for dim in order]
    return x.with_parts(lambda part: func(part, dims), dims.index(x.block_dim % x.ndim))


@handles(aten.unsqueeze.default)
def _unsqueeze(func: Any, x: MXTensor, dim: int) -> MXTensor:
    at, block = dim % (x.ndim + 1), x.block_dim % x.ndim
    return x.with_parts(lambda part: func(part, at), block + (at <= block))


@handles(aten.squeeze.dim)
def _squeeze(func: Any, x: MXTensor, dim: int) -> Any:
    at, block = dim % x.ndim, x.block_dim % x.ndim
    if at == block:
        return NotImplemented
    gone = x.shape[at] == 1 and at < block
    return x.with_parts(lambda part: func(part, at), block - gone)


@handles(aten.select.int)
def _select(func: Any, x: MXTensor, dim: int, index: int) -> Any:
    at, block = dim % x.ndim, x.block_dim % x.ndim
    if at == block:
        return NotImplemented
    return x.with_parts(lambda part: func(part, at, index), block - (at < block))


@handles(aten.unbind.int)
def _unbind(func: Any, x: MXTensor, dim: int = 0) -> Any:
    at, block = dim % x.ndim, x.block_dim % x.ndim
    if at == block:
        return NotImplemented
    return _paired(x, func(x.qdata, at), func(x.scale_bytes, at), block - (at < block))


@handles(aten.split.Tensor, aten.split_with_sizes.default)
def _split(func: Any, x: MXTensor, sizes: int | Sequence[int], dim: int = 0) -> Any:
    at, block = dim % x.ndim, x.block_dim % x.ndim
    if at != block:
        return _paired(x, func(x.qdata, sizes, at), func(x.scale_bytes, sizes, at), block)
    every = [sizes] if isinstance(sizes, int) else sizes[:-1]
    if any(size % BLOCK for size in every):
        return NotImplemented
    blocks = sizes // BLOCK if isinstance(sizes, int) else [num_blocks(size) for size in sizes]
    per_byte = x.elem.per_byte
    held = sizes // per_byte if isinstance(sizes, int) else [size // per_byte for size in sizes]
    return _paired(x, func(x.qdata, held, at), func(x.scale_bytes, blocks, at), block)


def _paired(
    x: MXTensor, elements: Sequence[Tensor], scales: Sequence[Tensor], block_dim: int
) -> list[MXTensor]:
    return [x.of_parts(q, s, block_dim) for q, s in zip(elements, scales, strict=True)]


@handles(aten.slice.Tensor)
def _slice(
    func: Any, x: MXTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    at, block = dim % x.ndim, x.block_dim % x.ndim
    if at != block:
        return x.with_parts(lambda part: func(part, at, start, end, step), block)
    length = x.shape[at]
    first, last, _ = slice(start, end).indices(length)
    if step != 1 or first % BLOCK or (last % BLOCK and last != length) or last < first:
        return NotImplemented
    scales = func(x.scale_bytes, at, first // BLOCK, num_blocks(last))
    elements = func(x.qdata, at, first // x.elem.per_byte, last // x.elem.per_byte)
    return x.of_parts(elements, scales, block)


@handles(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default)
def _reshaped(func: Any, x: MXTensor, shape: Sequence[int], **kwargs: Any) -> Any:
    """Another shape of the dimensions before the last, which is the blocked one and stays."""
    shape = list(shape)
    is_last = x.block_dim % x.ndim == x.ndim - 1
    if not is_last or not shape or shape[-1] not in (x.shape[-1], -1):
        return NotImplemented
    held = shape if shape[-1] == -1 else [*shape[:-1], x.qdata.shape[-1]]
    elements = func(x.qdata, held, **kwargs)
    if elements.shape[-1] != x.qdata.shape[-1]:
        return NotImplemented
    blocks = [*elements.shape[:-1], x.scale_bytes.shape[-1]]
    return x.of_parts(elements, func(x.scale_bytes, blocks, **kwargs), elements.ndim - 1)


@handles(aten.index_select.default)
def _index_select(func: Any, x: MXTensor, dim: int, index: Tensor) -> Any:
    at, block = dim % x.ndim, x.block_dim % x.ndim
    return NotImplemented if at == block else x.with_parts(lambda part: func(part, at, index), block)


@handles(aten.index.Tensor)
def _index(func: Any, x: MXTensor, indices: Sequence[Tensor | None]) -> Any:
    """Rows: the leading dimensions indexed, without a gap and without the last, which is the blocked one."""
    is_last = x.block_dim % x.ndim == x.ndim - 1
    if not is_last or any(index is None or index.dtype in (torch.bool, torch.uint8) for index in indices):
        return NotImplemented
    if len(indices) >= x.ndim:
        return NotImplemented
    return x.with_parts(lambda part: func(part, indices), -1)


@handles(aten.embedding.default)
def _embedding(func: Any, x: MXTensor, indices: Tensor, *_: Any, **__: Any) -> Any:
    if x.block_dim % x.ndim != 1:
        return NotImplemented
    rows = x.with_parts(lambda part: part[indices], -1)
    return rows.dequantize(x.dtype)


@handles(aten.cat.default, aten.stack.default)
def _joined(func: Any, tensors: Sequence[Any], dim: int = 0) -> Any:
    """Tensors in one format, joined along another dimension than the blocked one."""
    first = tensors[0]
    if not all(isinstance(x, MXTensor) for x in tensors):
        return NotImplemented
    formats = {(x.elem, x.block_dim % x.ndim, x.ndim, x.dtype) for x in tensors}
    block, stacks = first.block_dim % first.ndim, func is aten.stack.default
    at = dim % (first.ndim + stacks)
    if len(formats) > 1 or (not stacks and at == block):
        return NotImplemented
    elements, scales = (func([part(x) for x in tensors], at) for part in (_elements, _scales))
    return first.of_parts(elements, scales, block + (stacks and at <= block))


def _elements(x: MXTensor) -> Tensor:
    return x.qdata


def _scales(x: MXTensor) -> Tensor:
    return x.scale_bytes


@handles(aten.copy_.default)
def _copy(func: Any, x: Any, source: Tensor, non_blocking: bool = False) -> Any:
    """`source` into `x`: as it is, where elements and blocks are alike, else quantized."""
    if not isinstance(x, MXTensor):
        return func(x, dense(source) if isinstance(source, MXTensor) else source, non_blocking)
    if source.shape != x.shape:
        source = source.expand(x.shape)
    alike = isinstance(source, MXTensor) and source.elem == x.elem
    if alike and source.block_dim % x.ndim == x.block_dim % x.ndim:  # type: ignore[attr-defined]
        parts = source.qdata, source.scale_bytes  # type: ignore[attr-defined]
    else:
        high = dense(source) if isinstance(source, MXTensor) else source
        parts = encode_stored(high, x.block_dim, x.elem, "rceil")
    func(x.qdata, parts[0], non_blocking)
    func(x.scale_bytes, parts[1], non_blocking)
    return x
