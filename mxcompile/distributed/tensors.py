"""Tensor subclasses for a weight that FSDP2 gathers in MXFP8.

    rank's shard      MasterWeight   the values in the master's precision
    during a gather   qdata and one scale byte per 32×32 tile: 1 + 1/1024 bytes per element
    after the gather  TiledWeight    qdata and scales of the whole weight

A 32×32 tile has the same scale along both dimensions, so one cast serves fprop and dgrad. An operator on a
`MasterWeight` computes with its values and returns a plain tensor. Operators that only move or shard the
values keep the type. Eager operators on a `TiledWeight` decode it; compiled graphs take qdata and scales as
inputs of their GEMMs (see `passes/reuse`). Gradients of both types are plain tensors in the weight's dtype.

FSDP2 calls `fsdp_pre_all_gather` and `fsdp_post_all_gather` (torch's FSDP extensions). It frees and refills
the storage of the gathered tensors; qdata and scales are views of this storage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from mxcompile import ops
from mxcompile.errors import FormatError, ModelError
from mxcompile.formats import BLOCK, Format, Rounding, Tile, elem_type, num_blocks, rounding
from mxcompile.formats.encoding import encode_tensors
from mxcompile.storage.tensor import stored_bytes

aten = torch.ops.aten

_CHUNK = 1 << 22
"""Elements per step of a cast. It bounds each FP32 temporary to 16 MiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TileCast:
    """Rowwise and columnwise quantization of a weight, with one scale per 32×32 tile.

    name: path of the weight, for messages. elem_dtype: FP8 dtype of the qdata. rounding: the scales'.
    """

    name: str
    elem_dtype: torch.dtype
    rounding: str

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns qdata [..., n, k] and scale bytes [..., ⌈n/32⌉, ⌈k/32⌉] (uint8) of `x` [..., n, k]."""
        matrices = x.detach().reshape(-1, *x.shape[-2:])
        count, rows, width = matrices.shape
        qdata = torch.empty(matrices.shape, dtype=self.elem_dtype, device=x.device)
        shape = count, num_blocks(rows), num_blocks(width)
        scale = torch.empty(shape, dtype=torch.uint8, device=x.device)
        step = max(BLOCK, _CHUNK // max(1, width) // BLOCK * BLOCK)
        form = Format(elem=elem_type(self.elem_dtype), rounding=rounding(self.rounding), tile=Tile.SQUARE)
        for index in range(count):
            for start in range(0, rows, step):
                part = slice(start, start + step)
                codes, scales = encode_tensors(matrices[index, part], -1, form)
                qdata[index, part] = codes
                scale[index, start // BLOCK : num_blocks(min(start + step, rows))] = scales
        return qdata.view(x.shape), scale.view(*x.shape[:-2], *shape[1:])


class MasterWeight(Tensor):
    """A weight, or one rank's shard of it, that FSDP2 gathers in MXFP8.

    master: the plain tensor with the values. cast: cast before the gather.
    """

    master: Tensor
    cast: TileCast

    @staticmethod
    def __new__(cls, values: Tensor, cast: TileCast) -> MasterWeight:  # noqa: D102
        wrapper: MasterWeight = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=values.device,
        )
        wrapper.master, wrapper.cast = values, cast
        return wrapper

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        plain = tree_map_only(MasterWeight, lambda x: x.master, (tuple(args), kwargs or {}))
        result = func(*plain[0], **plain[1])
        first = args[0] if args else None
        if func in _MOVES and isinstance(first, MasterWeight):
            result = tree_map_only(Tensor, lambda part: MasterWeight(part, first.cast), result)
        elif not func._schema.is_mutable:
            return result
        return return_and_correct_aliasing(func, args, kwargs or {}, result)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """Returns the tensors that this rank sends: qdata and scale bytes of its shard.

        The cast reads the shard in ``mp_policy.param_dtype``. On a single rank the result is one flat uint8
        tensor, because FSDP2 accepts only one tensor there. Raises `ModelError` if a shard cuts a tile.
        """
        if reason := uneven(outer_size, mesh.size(), self.shape):
            raise ModelError(
                f"{self.cast.name} cannot be gathered in MXFP8: {reason}; pass quantize_gathers_ the mesh"
                " of fully_shard, and shard rows (no shard_placement_fn for this weight)"
            )
        dtype = mp_policy.param_dtype or self.dtype
        sent = self.cast(self.master.to(dtype))
        if mesh.size() > 1:
            return sent, None
        return (torch.cat([part.view(torch.uint8).flatten() for part in sent]),), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Returns the whole weight as a `TiledWeight`, or None if FSDP2 has refilled `out`.

        out: result of an earlier gather, whose storage FSDP2 has filled again. None for the first gather.
        """
        if out is not None:
            return None
        qdata, *scales = all_gather_outputs
        if not scales:
            codes, scale = qdata.tensor_split([self.numel()])
            qdata = codes.view(self.cast.elem_dtype).view(self.shape)
            scales = [scale.view(*self.shape[:-2], *map(num_blocks, self.shape[-2:]))]
        return TiledWeight(qdata, scales[0], self.cast.rounding, param_dtype), ()

    def __tensor_flatten__(self) -> tuple[list[str], TileCast]:
        return ["master"], self.cast

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Tensor], context: TileCast, outer_size: Any, outer_stride: Any
    ) -> MasterWeight:
        return MasterWeight(parts["master"], context)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the plain values, so that loading does not need mxcompile."""
        values = self.master.detach().requires_grad_(self.requires_grad)
        plain = torch.nn.Parameter(values, self.requires_grad) if hasattr(self, "_is_param") else values
        return plain.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"MasterWeight({self.master!r}, gathered as {self.cast.elem_dtype} in 32×32 tiles)"


_MOVES = frozenset({
    aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default,
    aten.empty_like.default, aten.new_zeros.default, aten.new_empty.default, aten.slice.Tensor,
    aten.split.Tensor, aten.view.default,
    aten.as_strided.default, aten.lift_fresh.default, aten._pin_memory.default,
})  # fmt: skip
"""Operators that shard or move a weight and keep its type."""


def local(x: Tensor) -> Tensor:
    """Returns the local tensor of a DTensor, or `x` itself."""
    shard: Tensor = getattr(x, "_local_tensor", x)
    return shard


def local_bytes(x: Tensor) -> int:
    """Returns the bytes of `x` on this rank, as stored."""
    return stored_bytes(local(x))


def with_local(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns `x` with its local tensor replaced by ``change(local)``."""
    if local(x) is x:
        return change(x)
    from torch.distributed.tensor import DTensor

    assert isinstance(x, DTensor)
    shard = change(x._local_tensor)
    result: Tensor = DTensor.from_local(
        shard, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )
    return result


def uneven(whole: Sequence[int], ranks: int, shard: Sequence[int] | None = None) -> str:
    """Returns why FSDP2 shards of a weight do not consist of whole tiles, or "" if they do.

    whole: shape of the weight. shard: shape of one shard. Default: equal shards of dimension 0.
    """
    rows = whole[0]
    if rows % ranks:
        return f"its {rows} rows do not come in equal shards on {ranks} ranks"
    expected = rows // ranks, *whole[1:]
    if shard is not None and tuple(shard) != expected:
        return f"a rank has a shard of {'×'.join(map(str, shard))}, not {'×'.join(map(str, expected))}"
    if len(whole) == 2 and ranks > 1 and expected[0] % BLOCK:
        return f"{expected[0]} of its {rows} rows on each of {ranks} ranks are not a multiple of {BLOCK}"
    return ""


class TiledWeight(Tensor):
    """A gathered weight as qdata and one scale per 32×32 tile. In-place operators raise `FormatError`.

    qdata: FP8 elements, [..., n, k]. scale: E8M0 scale bytes, [..., ⌈n/32⌉, ⌈k/32⌉]. rounding: rounding mode
    of the cast. dtype: dtype of the decoded values.
    """

    qdata: Tensor
    scale: Tensor
    rounding: str

    @staticmethod
    def __new__(  # noqa: D102
        cls, qdata: Tensor, scale: Tensor, rounding: str, dtype: torch.dtype
    ) -> TiledWeight:
        wrapper: TiledWeight = torch.Tensor._make_wrapper_subclass(
            cls, qdata.shape, strides=qdata.stride(), dtype=dtype, device=qdata.device
        )
        wrapper.qdata, wrapper.scale, wrapper.rounding = qdata, scale, rounding
        return wrapper

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        if isinstance(first, TiledWeight) and _same(func, first, args):
            result = TiledWeight(first.qdata, first.scale, first.rounding, first.dtype)
            return return_and_correct_aliasing(func, args, kwargs or {}, result)
        if func._schema.is_mutable and any(isinstance(written, TiledWeight) for written in args[:1]):
            raise FormatError(f"{func} would change a weight that was gathered in MXFP8; change its shards")
        plain = tree_map_only(TiledWeight, TiledWeight._values, (tuple(args), kwargs or {}))
        return func(*plain[0], **plain[1])

    def _values(self) -> Any:
        form = Format(elem=elem_type(self.qdata.dtype), rounding=Rounding(self.rounding), tile=Tile.SQUARE)
        return ops.decode(self.qdata, self.scale, -1, str(form), self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, torch.dtype]]:
        return ["qdata", "scale"], (self.rounding, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Tensor], context: tuple[str, torch.dtype], outer_size: Any, outer_stride: Any
    ) -> TiledWeight:
        return TiledWeight(parts["qdata"], parts["scale"], *context)

    def _stable_hash_for_caching(self) -> str:
        """Returns this tensor's part of AOTAutograd's cache key."""
        parts = ((part.shape, part.stride(), part.dtype) for part in (self.qdata, self.scale))
        about = self.device, self.dtype, self.rounding, self.requires_grad
        return repr((type(self).__name__, *parts, *about))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TiledWeight({tuple(self.shape)}, {self.qdata.dtype}, dtype={self.dtype})"


def _same(func: Any, x: TiledWeight, args: Sequence[Any]) -> bool:
    """Whether `func` returns `x` itself."""
    if func in (aten.detach.default, aten.alias.default):
        return True
    if func is aten.as_strided.default:
        size, stride, *offset = args[1:]
        return [*size] == [*x.shape] and [*stride] == [*x.stride()] and offset in ([], [0], [None])
    return func is aten.view.default and [*args[1]] == [*x.shape]
