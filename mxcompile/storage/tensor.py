"""`MXTensor` and `quantize`: MXFP8 or MXFP4 data as a tensor.

    value = element · 2^(byte − 127),  one byte for 32 elements along `block_dim`

MXFP4 has two elements in a byte, the first in the low half.

An `MXTensor` stands for the dense tensor of its values: it has that tensor's shape and dtype, and an operator
that does not know it gets the values (see `operators` for those that do). Autograd, FakeTensor, torch.compile
and torch.export see through it: codes and scale bytes are what a graph has as inputs. It is storage for
inference: nothing adds into it, and a value is put into it by `copy_` alone.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from mxcompile import ops
from mxcompile.errors import FormatError
from mxcompile.formats import BLOCK, ElemType, Format, num_blocks, stored_elem, stored_precision
from mxcompile.formats.encoding import encode_stored
from mxcompile.formats.numerics import check_source
from mxcompile.storage.handlers import HANDLERS

log = logging.getLogger(__name__)


class MXTensor(Tensor):
    """A tensor in MXFP8 or MXFP4: elements and the scales of their blocks.

    qdata: `torch.float8_e4m3fn` or `torch.float8_e5m2`, the shape of the source; or
    `torch.float4_e2m1fn_x2`, half as long along `block_dim`. As an attribute the latter is of bytes,
    `torch.uint8`, on which more operators work; `elem_dtype` tells which it is.
    scale: `torch.float8_e8m0fnu`, multiplies on dequantize, length ⌈n/32⌉ along `block_dim`.
    block_dim: the dimension blocks run along, kept as given (negative counts from the end).
    dtype: that of the values it stands for; computations with it are in this dtype.
    Raises `FormatError` for parts that do not belong together.
    """

    qdata: Tensor
    scale_bytes: Tensor
    block_dim: int
    elem: ElemType

    @staticmethod
    def __new__(  # noqa: D102
        cls, qdata: Tensor, scale: Tensor, block_dim: int = -1, dtype: torch.dtype = torch.bfloat16
    ) -> MXTensor:
        _check(qdata, scale, block_dim, dtype)
        elem = stored_elem(qdata.dtype)
        elements = qdata.view(torch.uint8) if elem.packed else qdata
        return cls._of(elements, scale.view(torch.uint8), block_dim, dtype, elem)

    @classmethod
    def _of(
        cls, qdata: Tensor, scale_bytes: Tensor, block_dim: int, dtype: torch.dtype, elem: ElemType
    ) -> MXTensor:
        """The tensor of parts that belong together; scale_bytes: the scales as uint8."""
        shape, strides = _unpacked(qdata, block_dim, elem.per_byte)
        wrapper: MXTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            shape,
            strides=strides,
            storage_offset=qdata.storage_offset() * elem.per_byte,
            dtype=dtype,
            device=qdata.device,
        )
        wrapper.qdata, wrapper.scale_bytes, wrapper.block_dim = qdata, scale_bytes, block_dim
        wrapper.elem = elem
        return wrapper

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = HANDLERS.get(func)
        if handler is not None:
            result = handler(func, *args, **kwargs)
            if result is not NotImplemented:
                whole = isinstance(result, list | MXTensor)
                return return_and_correct_aliasing(func, args, kwargs, result) if whole else result
        _refuse_mutation(func, args, kwargs)
        if func in _PRODUCTS and _is_eager(args):
            _warn_of_eager()
        dense_args, dense_kwargs = tree_map_only(MXTensor, dense, (tuple(args), kwargs))
        return func(*dense_args, **dense_kwargs)

    @property
    def scale(self) -> Tensor:
        """The scales, as `torch.float8_e8m0fnu`."""
        return self.scale_bytes.view(torch.float8_e8m0fnu)

    @property
    def elem_dtype(self) -> torch.dtype:
        """Torch's dtype of the elements: FP8, or `torch.float4_e2m1fn_x2`."""
        dtype = self.elem.stored_dtype
        assert dtype is not None
        return dtype

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Element · scale, computed exactly and rounded once to `dtype`, with the strides of `qdata`.

        Blocks whose scale is NaN (byte 255) are NaN. Raises `FormatError` for a non-float dtype.
        """
        if not dtype.is_floating_point:
            raise FormatError(f"cannot dequantize to {dtype}: not a floating-point dtype")
        order = _storage_order(self.qdata)
        form = (str(Format(elem=self.elem)),) if self.elem.packed else ()
        if order == [*range(self.ndim)]:
            values: Tensor = ops.dequantize(self.qdata, self.scale_bytes, self.block_dim, dtype, *form)
            return values
        dim = order.index(self.block_dim % self.ndim)
        stored = ops.dequantize(self.qdata.permute(order), self.scale_bytes.permute(order), dim, dtype, *form)
        result: Tensor = stored.permute([order.index(dim) for dim in range(self.ndim)])
        return result

    def with_parts(self, change: Callable[[Tensor], Tensor], block_dim: int | None = None) -> MXTensor:
        """The tensor of `change` of the elements and of the scales, blocks along `block_dim` of it."""
        dim = self.block_dim if block_dim is None else block_dim
        return self.of_parts(change(self.qdata), change(self.scale_bytes), dim)

    def of_parts(self, qdata: Tensor, scale_bytes: Tensor, block_dim: int) -> MXTensor:
        """Another tensor of such elements, standing for values in the same dtype."""
        return self._of(qdata, scale_bytes, block_dim, self.dtype, self.elem)

    def with_dtype(self, dtype: torch.dtype) -> MXTensor:
        """The same elements and scales, standing for values in `dtype`."""
        return self._of(self.qdata, self.scale_bytes, self.block_dim, dtype, self.elem)

    @property
    def stored_bytes(self) -> int:
        """Bytes of elements and scales together."""
        return self.qdata.numel() + self.scale_bytes.numel()

    def storage(self) -> Any:
        """Raises `FormatError`: elements and scales have one each. Safetensors asks, to write a file."""
        raise FormatError(
            "an MXTensor is two tensors and has no storage of its own: a model that has some is saved by"
            " mxcompile.save_quantized(model, directory), its state_dict by torch.save"
        )

    def share_memory_(self) -> MXTensor:
        """Move elements and scales to memory that other processes may map."""
        self.qdata.share_memory_()
        self.scale_bytes.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether they are in such memory."""
        return bool(self.qdata.is_shared() and self.scale_bytes.is_shared())

    def __tensor_flatten__(self) -> tuple[list[str], tuple[int, torch.dtype, torch.dtype]]:
        return ["qdata", "scale_bytes"], (self.block_dim, self.dtype, self.elem_dtype)

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Tensor],
        context: tuple[int, torch.dtype, torch.dtype],
        outer_size: Any,
        outer_stride: Any,
    ) -> MXTensor:
        block_dim, dtype, elem_dtype = context
        elem = stored_elem(elem_dtype)
        return MXTensor._of(parts["qdata"], parts["scale_bytes"], block_dim, dtype, elem)

    def _stable_hash_for_caching(self) -> str:
        """Returns the text that compiled code depends on, for AOTAutograd's cache."""
        parts = ((part.shape, part.stride(), part.dtype) for part in (self.qdata, self.scale_bytes))
        about = self.device, self.dtype, self.elem_dtype, self.block_dim, self.requires_grad
        return repr((type(self).__name__, *parts, *about))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Elements as bytes, since not every way of pickling knows FP8."""
        kind = bool(self.requires_grad), bool(getattr(self, "_is_param", False))
        parts = self.qdata.view(torch.uint8), self.scale_bytes
        return _rebuild, (*parts, self.elem_dtype, self.block_dim, self.dtype, *kind)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        elem = f"{stored_precision(self.elem)} {self.elem}"
        what = f"{tuple(self.shape)}, {elem}, block_dim={self.block_dim}, dtype={self.dtype}"
        where = "" if self.device.type == "cpu" else f", device={str(self.device)!r}"
        return f"MXTensor({what}{where})"


def _rebuild(
    codes: Tensor,
    scale_bytes: Tensor,
    elem_dtype: torch.dtype,
    block_dim: int,
    dtype: torch.dtype,
    requires_grad: bool,
    is_parameter: bool,
) -> Tensor:
    """Returns the tensor of a pickle, whose parts are checked like any others."""
    result = MXTensor(
        codes.view(elem_dtype), scale_bytes.view(torch.float8_e8m0fnu), block_dim, dtype
    ).requires_grad_(requires_grad)
    return torch.nn.Parameter(result, requires_grad=requires_grad) if is_parameter else result


torch.serialization.add_safe_globals([MXTensor, _rebuild])


def _unpacked(qdata: Tensor, block_dim: int, per_byte: int) -> tuple[Sequence[int], Sequence[int]]:
    """Shape and strides of the elements of `qdata`, `per_byte` along `block_dim` in each of its own."""
    if per_byte == 1:
        return qdata.shape, qdata.stride()
    dim, shape, strides = block_dim % qdata.ndim, list(qdata.shape), list(qdata.stride())
    shape[dim] *= per_byte
    inner = strides[dim]
    return shape, [stride * per_byte if stride > inner else stride for stride in strides]


def _check(qdata: Tensor, scale: Tensor, block_dim: int, dtype: torch.dtype) -> None:
    elem = stored_elem(qdata.dtype)
    if scale.dtype is not torch.float8_e8m0fnu:
        raise FormatError(f"scale must be torch.float8_e8m0fnu, not {scale.dtype}")
    if not -qdata.ndim <= block_dim < qdata.ndim:
        raise FormatError(f"block_dim {block_dim} is outside qdata of {qdata.ndim} dimensions")
    expected = list(qdata.shape)
    expected[block_dim] = num_blocks(expected[block_dim] * elem.per_byte)
    if list(scale.shape) != expected:
        raise FormatError(
            f"scale has shape {tuple(scale.shape)}; qdata {tuple(qdata.shape)} in blocks"
            f" of {BLOCK} along dimension {block_dim} needs {tuple(expected)}"
        )
    if scale.device != qdata.device:
        raise FormatError(f"qdata is on {qdata.device}, scale on {scale.device}")
    if not dtype.is_floating_point:
        raise FormatError(f"an MXTensor stands for floating-point values, not {dtype}")


_PRODUCTS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
        torch.ops.aten.linear.default,
    }
)


def _is_eager(args: Sequence[Any]) -> bool:
    """Whether an `MXTensor` among `args` has values, which traced ones lack."""
    stored = (x for x in args if isinstance(x, MXTensor))
    return any(type(x.qdata) is Tensor and not x.is_meta for x in stored)


@functools.cache
def _warn_of_eager() -> None:
    """Say once that a model with stored weights is slow uncompiled."""
    log.warning(
        "a product with a stored weight runs uncompiled: it dequantizes the whole weight in every call, which"
        ' is many times slower than BF16; compile the model, with backend="mxfp8" say'
    )


def dense(x: MXTensor) -> Tensor:
    """Returns the tensor of values that `x` stands for."""
    return x.dequantize(x.dtype)


def _refuse_mutation(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raises `FormatError` if `func` writes into an `MXTensor`. The schemas of collectives do not say it."""
    if func.namespace == "c10d":
        raise FormatError(f"{func} takes no MXTensor: give it the tensor's qdata, then its scale_bytes")
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        written = args[index] if index < len(args) else kwargs.get(argument.name)
        if any(isinstance(leaf, MXTensor) for leaf in tree_leaves(written)):
            raise FormatError(
                f"{func} would change an MXTensor in place, which is storage for inference; change"
                " tensor.dequantize() and quantize the result"
            )


def _storage_order(qdata: Tensor) -> list[int]:
    """The dimensions in the order in which they lie in memory, the outermost first."""
    strides = qdata.stride()
    return sorted(range(qdata.ndim), key=lambda dim: -strides[dim])


def quantize(
    x: Tensor,
    *,
    block_dim: int = -1,
    elem_dtype: torch.dtype = torch.float8_e4m3fn,
    rounding: str = "rceil",
) -> MXTensor:
    """Cast `x` to MXFP8 or MXFP4 in blocks of 32 along `block_dim`.

    x: any float dtype (FP64 is rounded to FP32 first), any rank ≥ 1, any length, for MXFP4 an even one; a
    short last block is a block. elem_dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`, or
    `torch.float4_e2m1fn_x2` for MXFP4. rounding, of the scale: ``rceil`` (arXiv 2506.08027), ``floor`` (OCP
    MX v1.0), ``ceil``, ``even``. Elements round to nearest even and saturate; a block holding NaN or Inf
    becomes NaN. The result has the dtype of `x` and no gradient. Raises `FormatError`.
    """
    check_source(x, block_dim)
    qdata, scale = encode_stored(x.detach(), block_dim, stored_elem(elem_dtype), rounding)
    return MXTensor(qdata.view(elem_dtype), scale.view(torch.float8_e8m0fnu), block_dim, x.dtype)
