"""The tensors that FSDP2 shards and gathers for a weight that travels in MXFP8.

    rank's shard     MasterWeight   the values in the master's precision
    before a gather  codes, one scale for 32×32 elements: 1 + 1/1024 bytes an element
    after it         TiledWeight    the same, which stands for the values

One cast serves fprop and dgrad, whichever dimension they contract. An operator on a `MasterWeight` acts on
its values, and its result is plain; operators that move the values, to another device, dtype or into shards,
keep the type. Operators on a `TiledWeight` read the values of its codes; compiled graphs have codes and
scales as inputs, which their products read (see `passes/reuse`). Gradients of either are plain tensors in the
weight's dtype.

FSDP2 calls `fsdp_pre_all_gather` and `fsdp_post_all_gather` (torch's FSDP extensions). It frees and refills
the storage of gathered tensors; codes and scales are views of it.
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
from mxcompile.formats import BLOCK, Format, Rounding, Tile, elem_type, num_blocks
from mxcompile.formats.encoding import quantize_tensors

aten = torch.ops.aten

_CHUNK = 1 << 22
"""Elements cast at once: a few temporaries of 16 MiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TileCast:
    """The cast of a weight before it is gathered.

    Attributes:
        name: Path of the weight.
        elem_dtype: Dtype of the codes.
        rounding: Rounding of the scales.
    """

    name: str
    elem_dtype: torch.dtype
    rounding: str

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns codes and scale bytes of `x[…, n, k]`: [..., n, k] and [..., ⌈n/32⌉, ⌈k/32⌉], uint8."""
        matrices = x.detach().reshape(-1, *x.shape[-2:])
        count, rows, width = matrices.shape
        qdata = torch.empty(matrices.shape, dtype=self.elem_dtype, device=x.device)
        shape = count, num_blocks(rows), num_blocks(width)
        scale = torch.empty(shape, dtype=torch.uint8, device=x.device)
        step = max(BLOCK, _CHUNK // max(1, width) // BLOCK * BLOCK)
        for index in range(count):
            for start in range(0, rows, step):
                part = slice(start, start + step)
                codes, repeated = quantize_tensors(
                    matrices[index, part], -1, self.elem_dtype, self.rounding, square=True
                )
                qdata[index, part] = codes
                scale[index, start // BLOCK : num_blocks(min(start + step, rows))] = repeated[::BLOCK]
        return qdata.view(x.shape), scale.view(*x.shape[:-2], *shape[1:])


class MasterWeight(Tensor):
    """A weight, or a rank's shard of it, that is cast to MXFP8 before FSDP2 gathers it.

    Attributes:
        master: The plain tensor.
        cast: Its cast.
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
        plain_args, plain_kwargs = tree_map_only(
            MasterWeight, lambda x: x.master, (tuple(args), kwargs or {})
        )
        result = func(*plain_args, **plain_kwargs)
        first = args[0] if args else None
        if func in _MOVES and isinstance(first, MasterWeight):
            result = tree_map_only(Tensor, lambda part: MasterWeight(part, first.cast), result)
        elif not func._schema.is_mutable:
            return result
        return return_and_correct_aliasing(func, args, kwargs or {}, result)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """Returns the tensors that this rank sends: codes and scale bytes of its shard.

        The shard is cast from the dtype that FSDP2 would send. On one rank the result is one tensor, because
        FSDP2 takes only one there.

        Raises:
            ModelError: The shards cut a tile.
        """
        if reason := uneven(outer_size, mesh.size(), self.shape):
            raise ModelError(
                f"{self.cast.name} cannot be gathered in MXFP8: {reason}; give quantize_gathers_ the mesh"
                " that fully_shard is given, and shard rows (no shard_placement_fn for this weight)"
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
        """Returns the whole weight from all ranks' parts. out: an earlier result, to be filled again."""
        if out is not None:
            return None
        qdata, scale = self._parts(all_gather_outputs)
        return TiledWeight(qdata, scale, self.cast.rounding, param_dtype), ()

    def _parts(self, gathered: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if len(gathered) > 1:
            return gathered
        codes, scale = gathered[0].tensor_split([self.numel()])
        rows, width = map(num_blocks, self.shape[-2:])
        shape = *self.shape[:-2], rows, width
        return codes.view(self.cast.elem_dtype).view(self.shape), scale.view(shape)

    def __tensor_flatten__(self) -> tuple[list[str], TileCast]:
        return ["master"], self.cast

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Tensor], context: TileCast, outer_size: Any, outer_stride: Any
    ) -> MasterWeight:
        return MasterWeight(parts["master"], context)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the plain values, so that a reader does not need mxcompile."""
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
"""Operators that make shards of a weight, or move it."""


def local(x: Tensor) -> Tensor:
    """Returns this rank's part of `x`, a DTensor or a plain tensor."""
    held: Tensor = getattr(x, "_local_tensor", x)
    return held


def local_bytes(x: Tensor) -> int:
    """Returns the bytes of this rank's part of `x`."""
    return int(local(x).nbytes)


def with_local(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns `x` after a `change` of this rank's part of it."""
    if local(x) is x:
        return change(x)
    from torch.distributed.tensor import DTensor

    assert isinstance(x, DTensor)
    held = change(x._local_tensor)
    result: Tensor = DTensor.from_local(
        held, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )
    return result


def uneven(whole: Sequence[int], ranks: int, shard: Sequence[int] | None = None) -> str:
    """Returns why shards of a weight of shape `whole` on `ranks` ranks are not whole tiles; "" if they are.

    shard: the shape of a shard; by default as FSDP2 makes them.
    """
    rows = whole[0]
    if rows % ranks:
        return f"its {rows} rows do not come in equal shards on {ranks} ranks"
    expected = rows // ranks, *whole[1:]
    if shard is not None and tuple(shard) != expected:
        return f"a rank holds {'×'.join(map(str, shard))} of it, not {'×'.join(map(str, expected))}"
    if len(whole) == 2 and ranks > 1 and expected[0] % BLOCK:
        return f"{expected[0]} of its {rows} rows on each of {ranks} ranks are not a multiple of {BLOCK}"
    return ""


class TiledWeight(Tensor):
    """A weight that consists of codes and the scales of its 32×32 tiles. Nothing changes it in place.

    Attributes:
        qdata: [..., n, k], FP8.
        scale: [..., ⌈n/32⌉, ⌈k/32⌉], E8M0 bytes.
        rounding: Rounding of the cast that made them.
        dtype: Dtype of the values it stands for.
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
        plain_args, plain_kwargs = tree_map_only(
            TiledWeight,
            TiledWeight._values,
            (tuple(args), kwargs or {}),
        )
        return func(*plain_args, **plain_kwargs)

    def _values(self) -> Tensor:
        form = Format(elem=elem_type(self.qdata.dtype), rounding=Rounding(self.rounding), tile=Tile.SQUARE)
        values: Tensor = ops.decode(self.qdata, self.scale, -1, str(form), self.dtype)
        return values

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, torch.dtype]]:
        return ["qdata", "scale"], (self.rounding, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Tensor], context: tuple[str, torch.dtype], outer_size: Any, outer_stride: Any
    ) -> TiledWeight:
        return TiledWeight(parts["qdata"], parts["scale"], *context)

    def _stable_hash_for_caching(self) -> str:
        """Returns the text that compiled code depends on, for AOTAutograd's cache."""
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
