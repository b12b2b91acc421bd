"""Operators that keep the blocks of an `MXTensor` whole act on elements and scales alike.

    f(MX(q, s)) = MX(f(q), f(s))       moves, copies, transposes, rows, views that leave the blocked
                                       dimension alone
    f(MX(q, s)) = f(dequantize(q, s))  every other operator

A slice along the blocked dimension is of the first kind if it starts and ends with a block: elements that
share a byte are neighbours along that dimension. A global scale changes too where it has more than one number
along the dimensions that change. Only `copy_` may change an `MXTensor` in place; it quantizes a source that
is in another format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mxcompile.formats import num_blocks
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
    """Returns `x` on another device, or standing for values in another floating-point dtype."""
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
    if x.shape[at] != 1:
        return x.with_parts(lambda part: func(part, at), block, lambda whole: whole)
    return x.with_parts(lambda part: func(part, at), block - (at < block))


@handles(aten.select.int)
def _select(func: Any, x: MXTensor, dim: int, index: int) -> Any:
    at, block = dim % x.ndim, x.block_dim % x.ndim
    if at == block:
        return NotImplemented

    def of_whole(whole: Tensor) -> Tensor:
        return whole.select(at, 0 if whole.shape[at] == 1 else index)

    return x.with_parts(lambda part: func(part, at, index), block - (at < block), of_whole)


@handles(aten.unbind.int)
def _unbind(func: Any, x: MXTensor, dim: int = 0) -> Any:
    at, block = dim % x.ndim, x.block_dim % x.ndim
    if at == block:
        return NotImplemented
    whole = x.global_scale
    wholes = None if whole is None else whole.expand(_along(x, whole, at)).unbind(at)
    return _paired(x, func(x.qdata, at), func(x.scale_bytes, at), block - (at < block), wholes)


@handles(aten.split.Tensor, aten.split_with_sizes.default)
def _split(func: Any, x: MXTensor, sizes: int | Sequence[int], dim: int = 0) -> Any:
    at, block = dim % x.ndim, x.block_dim % x.ndim
    if at != block:
        whole = x.global_scale
        wholes = None if whole is None or whole.shape[at] == 1 else func(whole, sizes, at)
        return _paired(x, func(x.qdata, sizes, at), func(x.scale_bytes, sizes, at), block, wholes)
    every = [sizes] if isinstance(sizes, int) else sizes[:-1]
    if any(size % x.block for size in every):
        return NotImplemented
    blocks = sizes // x.block if isinstance(sizes, int) else [num_blocks(size, x.block) for size in sizes]
    per_byte = x.form.elem.per_byte
    held = sizes // per_byte if isinstance(sizes, int) else [size // per_byte for size in sizes]
    return _paired(x, func(x.qdata, held, at), func(x.scale_bytes, blocks, at), block)


def _along(x: MXTensor, whole: Tensor, *dims: int) -> list[int]:
    """Returns the shape of `whole`, a global scale, with the sizes of `x` in `dims`."""
    return [x.shape[dim] if dim in dims else size for dim, size in enumerate(whole.shape)]


def _paired(
    x: MXTensor,
    elements: Sequence[Tensor],
    scales: Sequence[Tensor],
    block_dim: int,
    wholes: Sequence[Tensor] | None = None,
) -> list[MXTensor]:
    """Returns tensors of these parts. wholes: their global scales, if they differ from the one of `x`."""
    own: Sequence[Tensor | None] = [x.global_scale] * len(elements) if wholes is None else wholes
    return [x.of_parts(q, s, block_dim, w) for q, s, w in zip(elements, scales, own, strict=True)]


@handles(aten.slice.Tensor)
def _slice(
    func: Any, x: MXTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    at, block = dim % x.ndim, x.block_dim % x.ndim
    if at != block:
        return x.with_parts(
            lambda part: func(part, at, start, end, step),
            block,
            lambda whole: whole if whole.shape[at] == 1 else func(whole, at, start, end, step),
        )
    length, per_byte = x.shape[at], x.form.elem.per_byte
    first, last, _ = slice(start, end).indices(length)
    if step != 1 or first % x.block or (last % x.block and last != length) or last < first:
        return NotImplemented
    scales = func(x.scale_bytes, at, first // x.block, num_blocks(last, x.block))
    elements = func(x.qdata, at, first // per_byte, last // per_byte)
    return x.of_parts(elements, scales, block, x.global_scale)


@handles(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default)
def _reshaped(func: Any, x: MXTensor, shape: Sequence[int], **kwargs: Any) -> Any:
    """Returns `x` in another shape of the dimensions before the last, which is the blocked dimension."""
    shape = list(shape)
    is_last = x.block_dim % x.ndim == x.ndim - 1
    if not is_last or not shape or shape[-1] not in (x.shape[-1], -1):
        return NotImplemented
    held = shape if shape[-1] == -1 else [*shape[:-1], x.qdata.shape[-1]]
    elements = func(x.qdata, held, **kwargs)
    if elements.shape[-1] != x.qdata.shape[-1]:
        return NotImplemented
    blocks = [*elements.shape[:-1], x.scale_bytes.shape[-1]]
    whole = x.global_scale
    if whole is not None and whole.numel() == 1:
        whole = whole.reshape([1] * elements.ndim)
    elif whole is not None and func is aten.expand.default:
        whole = whole.expand([*elements.shape[:-1], 1])
    elif whole is not None:
        whole = whole.expand([*x.shape[:-1], 1]).reshape([*elements.shape[:-1], 1])
    return x.of_parts(elements, func(x.scale_bytes, blocks, **kwargs), elements.ndim - 1, whole)


@handles(aten.index_select.default)
def _index_select(func: Any, x: MXTensor, dim: int, index: Tensor) -> Any:
    at, block = dim % x.ndim, x.block_dim % x.ndim
    if at == block:
        return NotImplemented
    return x.with_parts(
        lambda part: func(part, at, index),
        block,
        lambda whole: whole if whole.shape[at] == 1 else func(whole, at, index),
    )


@handles(aten.index.Tensor)
def _index(func: Any, x: MXTensor, indices: Sequence[Tensor | None]) -> Any:
    """Returns rows: indices of leading dimensions, without a gap and without the last, blocked dimension."""
    is_last = x.block_dim % x.ndim == x.ndim - 1
    if not is_last or any(index is None or index.dtype in (torch.bool, torch.uint8) for index in indices):
        return NotImplemented
    if len(indices) >= x.ndim:
        return NotImplemented

    def of_whole(whole: Tensor) -> Tensor:
        rows: Tensor = func(whole.expand(_along(x, whole, *range(len(indices)))), indices)
        return rows

    return x.with_parts(lambda part: func(part, indices), -1, of_whole)


@handles(aten.embedding.default)
def _embedding(func: Any, x: MXTensor, indices: Tensor, *_: Any, **__: Any) -> Any:
    if x.block_dim % x.ndim != 1:
        return NotImplemented
    rows = _index(aten.index.Tensor, x, [indices])
    return rows.dequantize(x.dtype)


@handles(aten.cat.default, aten.stack.default)
def _joined(func: Any, tensors: Sequence[Any], dim: int = 0) -> Any:
    """Joins tensors in one format along another dimension than the blocked dimension."""
    first = tensors[0]
    if not all(isinstance(x, MXTensor) for x in tensors):
        return NotImplemented
    formats = {(x.form, x.block_dim % x.ndim, x.ndim, x.dtype) for x in tensors}
    block, stacks = first.block_dim % first.ndim, func is aten.stack.default
    at = dim % (first.ndim + stacks)
    if len(formats) > 1 or (not stacks and at == block):
        return NotImplemented
    elements = func([x.qdata for x in tensors], at)
    scales = func([x.scale_bytes for x in tensors], at)
    whole = None if first.global_scale is None else func(_alike(tensors, None if stacks else at), at)
    return first.of_parts(elements, scales, block + (stacks and at <= block), whole)


def _alike(tensors: Sequence[MXTensor], at: int | None) -> list[Tensor]:
    """Returns the global scales of `tensors` in one shape, but in dimension `at` as long as each tensor."""
    wholes = [x.global_scale for x in tensors if x.global_scale is not None]
    shape = [max(sizes) for sizes in zip(*(whole.shape for whole in wholes), strict=True)]
    return [
        whole.expand([x.shape[dim] if dim == at else size for dim, size in enumerate(shape)])
        for x, whole in zip(tensors, wholes, strict=True)
    ]


@handles(aten.copy_.default)
def _copy(func: Any, x: Any, source: Tensor, non_blocking: bool = False) -> Any:
    """Copies `source` into `x`: elements and scales if the format is the same, else the quantized values."""
    if not isinstance(x, MXTensor):
        return func(x, dense(source) if isinstance(source, MXTensor) else source, non_blocking)
    if source.shape != x.shape:
        source = source.expand(x.shape)
    if isinstance(source, MXTensor) and _holds(x, source):
        parts = source.parts
    else:
        high = dense(source) if isinstance(source, MXTensor) else source
        encoded = encode_stored(high, x.block_dim, x.form)
        parts = tuple(part for part in encoded if part is not None)
    for own, part in zip(x.parts, parts, strict=True):
        func(own, part, non_blocking)
    return x


def _holds(x: MXTensor, source: MXTensor) -> bool:
    """Whether the parts of `source` fit those of `x`."""
    if source.form != x.form or source.block_dim % x.ndim != x.block_dim % x.ndim:
        return False
    if x.global_scale is None or source.global_scale is None:
        return True
    sizes = zip(x.global_scale.shape, source.global_scale.shape, strict=True)
    return all(other in (1, own) for own, other in sizes)
