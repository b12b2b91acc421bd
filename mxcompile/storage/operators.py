"""Operators that keep the blocks of an `MXTensor` whole act on qdata and scales alike.

    f(MX(q, s)) = MX(f(q), f(s))       moves, copies, transposes, row selections, views that leave the blocked
                                       dimension alone
    f(MX(q, s)) = f(dequantize(q, s))  every other operator

A slice along the blocked dimension is of the first kind if it starts and ends at block boundaries. The two
FP4 elements of a byte are neighbours along that dimension. A global scale that varies along the changed
dimensions changes, too. Only `copy_` may change an `MXTensor` in place; it quantizes a source of another
format.

A scatter, by which DTensor shards a tensor, sends qdata and scale bytes instead of values. A shard that cuts
scale blocks was dequantized by the split and is sent as values. A broadcast sends values, because the format
can differ between ranks: PyTorch receives a state dict in dense tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, distributed

from mxcompile.errors import FormatError
from mxcompile.formats import num_blocks
from mxcompile.storage.tensor import HANDLERS, MXTensor, dense, encoded

aten = torch.ops.aten

_Handler = Callable[..., Any]
"""Takes the operator and its arguments. Returns the result, or `NotImplemented` if blocks would break."""


def handles(*ops: Any) -> Callable[[_Handler], _Handler]:
    """Returns a decorator that registers a function in `HANDLERS` for each of `ops`."""

    def register(handler: _Handler) -> _Handler:
        HANDLERS.update(dict.fromkeys(ops, handler))
        return handler

    return register


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
    """Returns `x` on another device, or with another floating-point dtype of its values."""
    dtype = x.dtype if dtype is None else dtype
    if not dtype.is_floating_point or dtype.itemsize < 2:
        return NotImplemented
    return x.with_parts(lambda part: func(part, **kwargs), dtype=dtype)


@handles(aten.t.default, aten.transpose.int, aten.permute.default)
def _permuted(func: Any, x: MXTensor, *args: Any) -> MXTensor:
    order = [*range(x.ndim)]
    if func is aten.permute.default:
        order = [dim % x.ndim for dim in args[0]]
    else:
        first, second = (dim % x.ndim for dim in args or (0, -1))  # PyTorch refuses others below
        order[first], order[second] = order[second], order[first]
    return x.with_parts(lambda part: func(part, *args), order.index(x.block_dim % x.ndim))


@handles(aten.unsqueeze.default)
def _unsqueeze(func: Any, x: MXTensor, dim: int) -> MXTensor:
    at, block = dim % (x.ndim + 1), x.block_dim % x.ndim
    return x.with_parts(lambda part: func(part, at), block + (at <= block))


@handles(aten.squeeze.dim, aten.select.int)
def _dropped(func: Any, x: MXTensor, dim: int, *index: int) -> Any:
    """Returns `x` without the dimension `dim`. A squeeze leaves it, unless its length is 1."""
    at, block = dim % x.ndim, x.block_dim % x.ndim
    if at == block:
        return NotImplemented
    if not index and x.shape[at] != 1:
        return x.with_parts(lambda part: func(part, at), block, lambda whole: whole)
    return x.with_parts(
        lambda part: func(part, at, *index),
        block - (at < block),
        lambda whole: whole.select(at, 0 if whole.shape[at] == 1 else index[0]),
    )


@handles(aten.unbind.int)
def _unbind(_: Any, x: MXTensor, dim: int = 0) -> Any:
    if dim % x.ndim == x.block_dim % x.ndim:
        return NotImplemented
    return [_dropped(aten.select.int, x, dim, index) for index in range(x.shape[dim])]


@handles(aten.split.Tensor, aten.split_with_sizes.default)
def _split(_: Any, x: MXTensor, sizes: int | Sequence[int], dim: int = 0) -> Any:
    length = x.shape[dim]
    if isinstance(sizes, int):
        if sizes < 1:
            return NotImplemented
        sizes = [sizes] * max(1, -(-length // sizes))  # the last piece may be shorter
    elif sum(sizes) != length:
        return NotImplemented
    ends = zip(accumulate(sizes), sizes, strict=True)
    parts = [_slice(aten.slice.Tensor, x, dim, end - size, end) for end, size in ends]
    return NotImplemented if any(part is NotImplemented for part in parts) else parts


def _along(x: MXTensor, dim: int, change: Callable[[Tensor], Tensor]) -> MXTensor:
    """Returns `x` after `change` of each part; a global scale of length 1 along `dim` stays."""
    return x.with_parts(
        change, x.block_dim % x.ndim, lambda whole: whole if whole.shape[dim] == 1 else change(whole)
    )


@handles(aten.slice.Tensor)
def _slice(
    func: Any, x: MXTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    at, block = dim % x.ndim, x.block_dim % x.ndim
    if at != block:
        return _along(x, at, lambda part: func(part, at, start, end, step))
    length, per_byte = x.shape[at], x.form.elem.per_byte
    first, last, _ = slice(start, end).indices(length)
    if step != 1 or first % x.block or (last % x.block and last != length) or last < first:
        return NotImplemented
    scales = func(x.scale_bytes, at, first // x.block, num_blocks(last, x.block))
    elements = func(x.qdata, at, first // per_byte, last // per_byte)
    return x.of_parts(elements, scales, block, x.global_scale)


@handles(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default)
def _reshaped(func: Any, x: MXTensor, shape: Sequence[int], **kwargs: Any) -> Any:
    """Returns `x` with other leading dimensions; the last must be blocked and must keep its length."""
    shape = list(shape)
    is_last = x.block_dim % x.ndim == x.ndim - 1
    if not is_last or not shape or shape[-1] not in (x.shape[-1], -1):
        return NotImplemented
    qdata_shape = shape if shape[-1] == -1 else [*shape[:-1], x.qdata.shape[-1]]
    elements = func(x.qdata, qdata_shape, **kwargs)
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
    at = dim % x.ndim
    if at == x.block_dim % x.ndim:
        return NotImplemented
    return _along(x, at, lambda part: func(part, at, index))


@handles(aten.index.Tensor)
def _index(func: Any, x: MXTensor, indices: Sequence[Tensor | None]) -> Any:
    """Returns rows selected by consecutive leading indices; the last dimension must be the blocked one."""
    is_last = x.block_dim % x.ndim == x.ndim - 1
    if not is_last or any(index is None or index.dtype in (torch.bool, torch.uint8) for index in indices):
        return NotImplemented
    if len(indices) >= x.ndim:
        return NotImplemented
    picked = x.shape[: len(indices)]
    return x.with_parts(
        lambda part: func(part, indices),
        -1,
        lambda whole: func(whole.expand([*picked, *whole.shape[len(indices) :]]), indices),
    )


@handles(aten.embedding.default)
def _embedding(func: Any, x: MXTensor, indices: Tensor, *_: Any, **__: Any) -> Any:
    """Gathers rows of qdata and scales, and returns the values of these rows."""
    if x.block_dim % x.ndim != 1:
        return NotImplemented
    rows = x.with_parts(
        lambda part: func(part, indices), -1, lambda whole: func(whole.expand(x.shape[0], 1), indices)
    )
    return rows.dequantize(x.dtype)


@handles(aten.cat.default, aten.stack.default)
def _joined(func: Any, tensors: Sequence[Any], dim: int = 0) -> Any:
    """Joins tensors that share a format along a dimension that is not blocked."""
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
    whole = None if first.global_scale is None else func(_wholes(tensors, None if stacks else at), at)
    return first.of_parts(elements, scales, block + (stacks and at <= block), whole)


def _wholes(tensors: Sequence[MXTensor], at: int | None) -> list[Tensor]:
    """Returns the global scales, expanded to one shape except along `at`: there to the tensor's length."""
    wholes = [x.global_scale for x in tensors if x.global_scale is not None]
    shape = [max(sizes) for sizes in zip(*(whole.shape for whole in wholes), strict=True)]
    return [
        whole.expand([x.shape[dim] if dim == at else size for dim, size in enumerate(shape)])
        for x, whole in zip(tensors, wholes, strict=True)
    ]


@handles(aten.copy_.default)
def _copy(func: Any, x: Any, source: Any, non_blocking: bool = False) -> Any:
    """Copies `source` into `x`: its qdata and scales if the formats are equal, else its values, quantized."""
    if not isinstance(x, MXTensor):
        return func(x, dense(source), non_blocking)
    if source.shape != x.shape:
        source = source.expand(x.shape)
    if not (isinstance(source, MXTensor) and _holds(x, source)):
        source = encoded(dense(source) if isinstance(source, MXTensor) else source, x.block_dim, x.form)
    for target, part in zip(x.parts, source.parts, strict=True):
        func(target, part, non_blocking)
    return x


def _holds(x: MXTensor, source: MXTensor) -> bool:
    """Whether the parts of `source` fit the parts of `x`. A global scale of length 1 broadcasts."""
    if source.form != x.form or source.block_dim % x.ndim != x.block_dim % x.ndim:
        return False
    pairs = zip(x.parts, source.parts, strict=True)
    return all(size in (1, n) for to, part in pairs for n, size in zip(to.shape, part.shape, strict=True))


def _broadcast(func: Any, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
    """Sends the values of one rank to all others. A rank that has these values already keeps its codes."""
    sent = [dense(x).contiguous() if isinstance(x, MXTensor) else x for x in tensors]
    work = func(sent, *args, **kwargs)[1]
    work.wait()
    for x, values in zip(tensors, sent, strict=True):
        if isinstance(x, MXTensor) and not torch.equal(_bytes(dense(x)), _bytes(values)):
            _copy(aten.copy_.default, x, values)
    return tensors, work


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _scatter(
    func: Any, outputs: Sequence[MXTensor], inputs: Sequence[Sequence[Tensor]], *args: Any, **kwargs: Any
) -> Any:
    """Sends each rank its own tensor among the `inputs` of one rank, part by part."""
    for index in range(len(outputs[0].parts)):
        work = func(_parts(outputs, index), [_parts(row, index) for row in inputs], *args, **kwargs)[1]
        work.wait()
    return outputs, work


def _parts(tensors: Sequence[Tensor], index: int) -> list[Tensor]:
    """Returns part number `index` of each tensor, FP8 as bytes."""
    if not all(isinstance(tensor, MXTensor) for tensor in tensors):
        raise FormatError("a scatter got MXTensors together with others: give it tensors of one kind")
    parts = [tensor.parts[index] for tensor in tensors if isinstance(tensor, MXTensor)]
    return [part if part.dtype is torch.float32 else part.view(torch.uint8) for part in parts]


if distributed.is_available():
    handles(torch.ops.c10d.broadcast_.default)(_broadcast)
    handles(torch.ops.c10d.scatter_.default)(_scatter)
