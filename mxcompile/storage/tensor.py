"""`MXTensor` and `quantize`: MXFP8, MXFP4 or NVFP4 data as a tensor.

    value = element · 2^(byte − 127)            one byte for 32 elements along `block_dim`
    value = element · (scale / global scale)    NVFP4: one E4M3 scale for 16

MXFP4 and NVFP4 have two elements in a byte, the first in the low half. The global scale is what values were
multiplied by before they were cast, as in compressed-tensors' checkpoints, so that their values are exact.

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
from mxcompile.formats import (
    TWO_LEVEL,
    Format,
    Rounding,
    ScaleType,
    num_blocks,
    stored_form,
    stored_precision,
)
from mxcompile.formats.encoding import encode_stored
from mxcompile.formats.numerics import check_source
from mxcompile.storage.handlers import HANDLERS

log = logging.getLogger(__name__)

_PARTS = ("qdata", "scale_bytes", "global_scale")


class MXTensor(Tensor):
    """A tensor in MXFP8, MXFP4 or NVFP4: elements and the scales of their blocks.

    qdata: `torch.float8_e4m3fn` or `torch.float8_e5m2`, the shape of the source; or
    `torch.float4_e2m1fn_x2`, half as long along `block_dim`. As an attribute the latter is of bytes,
    `torch.uint8`, on which more operators work; `elem_dtype` tells which it is.
    scale: `torch.float8_e8m0fnu`, multiplies on dequantize, length ⌈n/32⌉ along `block_dim`; of NVFP4
    `torch.float8_e4m3fn`, ⌈n/16⌉.
    block_dim: the dimension blocks run along, kept as given (negative counts from the end).
    dtype: that of the values it stands for; computations with it are in this dtype.
    global_scale: of NVFP4, FP32, divides `scale` on dequantize. One number; or one for each index of some
    dimensions but `block_dim`, as where tensors were joined: as many dimensions as `qdata`, the others 1.
    Raises `FormatError` for parts that do not belong together.
    """

    qdata: Tensor
    scale_bytes: Tensor
    block_dim: int
    form: Format
    global_scale: Tensor | None

    @staticmethod
    def __new__(  # noqa: D102
        cls,
        qdata: Tensor,
        scale: Tensor,
        block_dim: int = -1,
        dtype: torch.dtype = torch.bfloat16,
        global_scale: Tensor | None = None,
    ) -> MXTensor:
        if global_scale is not None and global_scale.numel() == 1:
            global_scale = global_scale.reshape([1] * qdata.ndim)
        form = _checked(qdata, scale, block_dim, dtype, global_scale)
        elements = qdata.view(torch.uint8) if form.elem.packed else qdata
        return cls._of(elements, scale.view(torch.uint8), block_dim, dtype, form, global_scale)

    @classmethod
    def _of(
        cls,
        qdata: Tensor,
        scale_bytes: Tensor,
        block_dim: int,
        dtype: torch.dtype,
        form: Format,
        global_scale: Tensor | None,
    ) -> MXTensor:
        """The tensor of parts that belong together; scale_bytes: the scales as uint8."""
        per_byte = form.elem.per_byte
        shape, strides = _unpacked(qdata, block_dim, per_byte)
        wrapper: MXTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            shape,
            strides=strides,
            storage_offset=qdata.storage_offset() * per_byte,
            dtype=dtype,
            device=qdata.device,
        )
        wrapper.qdata, wrapper.scale_bytes, wrapper.block_dim = qdata, scale_bytes, block_dim
        wrapper.form, wrapper.global_scale = form, global_scale
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
        """The scales, as `torch.float8_e8m0fnu` or `torch.float8_e4m3fn`."""
        return self.scale_bytes.view(self.form.scale.stored_dtype)

    @property
    def elem_dtype(self) -> torch.dtype:
        """Torch's dtype of the elements: FP8, or `torch.float4_e2m1fn_x2`."""
        return self.form.stored_dtype

    @property
    def block(self) -> int:
        """Elements that share a scale."""
        return self.form.tile.along

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Element · scale, computed exactly and rounded once to `dtype`, with the strides of `qdata`.

        Of NVFP4 scale / global scale and its product with the element are rounded to FP32 each. Blocks whose
        scale is NaN (byte 255) are NaN. Raises `FormatError` for a non-float dtype.
        """
        if not dtype.is_floating_point:
            raise FormatError(f"cannot dequantize to {dtype}: not a floating-point dtype")
        order = _storage_order(self.qdata)
        if order == [*range(self.ndim)]:
            return self._decoded(self.block_dim, dtype, lambda part: part)
        dim = order.index(self.block_dim % self.ndim)
        stored = self._decoded(dim, dtype, lambda part: part.permute(order))
        return stored.permute([order.index(dim) for dim in range(self.ndim)])

    def _decoded(self, block_dim: int, dtype: torch.dtype, turned: Callable[[Tensor], Tensor]) -> Tensor:
        """The values of the parts as `turned` gives them, blocks along `block_dim` then."""
        form = (str(self.form),) if self.form.elem.packed else ()
        scale = turned(self.scale_bytes)
        whole = [] if self.global_scale is None else [turned(self.global_scale)]
        if whole:
            scale = scale.view(self.form.scale.dtype)
        values: Tensor = ops.dequantize(turned(self.qdata), scale, block_dim, dtype, *form, *whole)
        return values

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Elements, scale bytes, and the global scale if there is one."""
        whole = () if self.global_scale is None else (self.global_scale,)
        return (self.qdata, self.scale_bytes, *whole)

    def with_parts(
        self,
        change: Callable[[Tensor], Tensor],
        block_dim: int | None = None,
        global_change: Callable[[Tensor], Tensor] | None = None,
    ) -> MXTensor:
        """The tensor of `change` of the elements and of the scales, blocks along `block_dim` of it.

        global_change: of the global scale, where it is another one.
        """
        dim = self.block_dim if block_dim is None else block_dim
        whole = self.global_scale
        if whole is not None:
            whole = (global_change or change)(whole)
        return self.of_parts(change(self.qdata), change(self.scale_bytes), dim, whole)

    def of_parts(
        self, qdata: Tensor, scale_bytes: Tensor, block_dim: int, global_scale: Tensor | None
    ) -> MXTensor:
        """Another tensor of such elements, standing for values in the same dtype."""
        return self._of(qdata, scale_bytes, block_dim, self.dtype, self.form, global_scale)

    def with_dtype(self, dtype: torch.dtype) -> MXTensor:
        """The same elements and scales, standing for values in `dtype`."""
        return self._of(self.qdata, self.scale_bytes, self.block_dim, dtype, self.form, self.global_scale)

    @property
    def stored_bytes(self) -> int:
        """Bytes of elements and scales together."""
        return sum(part.nbytes for part in self.parts)

    def storage(self) -> Any:
        """Raises `FormatError`: elements and scales have one each. Safetensors asks, to write a file."""
        raise FormatError(
            "an MXTensor is several tensors and has no storage of its own: a model that has some is saved by"
            " mxcompile.save_quantized(model, directory), its state_dict by torch.save"
        )

    def share_memory_(self) -> MXTensor:
        """Move elements and scales to memory that other processes may map."""
        for part in self.parts:
            part.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether they are in such memory."""
        return all(part.is_shared() for part in self.parts)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[int, torch.dtype, str]]:
        return [*_PARTS[: len(self.parts)]], (self.block_dim, self.dtype, str(self.form))

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Tensor],
        context: tuple[int, torch.dtype, str],
        outer_size: Any,
        outer_stride: Any,
    ) -> MXTensor:
        block_dim, dtype, word = context
        qdata, scale_bytes, whole = map(parts.get, _PARTS)
        assert qdata is not None
        assert scale_bytes is not None
        return MXTensor._of(qdata, scale_bytes, block_dim, dtype, Format.of(word), whole)

    def _stable_hash_for_caching(self) -> str:
        """Returns the text that compiled code depends on, for AOTAutograd's cache."""
        parts = ((part.shape, part.stride(), part.dtype) for part in self.parts)
        about = self.device, self.dtype, self.elem_dtype, str(self.form), self.block_dim, self.requires_grad
        return repr((type(self).__name__, *parts, *about))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Elements as bytes, since not every way of pickling knows FP8."""
        kind = bool(self.requires_grad), bool(getattr(self, "_is_param", False))
        parts = self.qdata.view(torch.uint8), self.scale_bytes
        whole = () if self.global_scale is None else (self.global_scale,)
        return _rebuild, (*parts, self.elem_dtype, self.block_dim, self.dtype, *kind, *whole)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        elem = f"{stored_precision(self.form)} {self.form.elem}"
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
    global_scale: Tensor | None = None,
) -> Tensor:
    """Returns the tensor of a pickle, whose parts are checked like any others."""
    kind = ScaleType.E8M0 if global_scale is None else ScaleType.E4M3
    scale = scale_bytes.view(kind.stored_dtype)
    result = MXTensor(codes.view(elem_dtype), scale, block_dim, dtype, global_scale)
    result.requires_grad_(requires_grad)
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


def _checked(
    qdata: Tensor, scale: Tensor, block_dim: int, dtype: torch.dtype, global_scale: Tensor | None
) -> Format:
    """The format of parts that belong together."""
    form = stored_form(qdata.dtype, Rounding.RCEIL if global_scale is None else TWO_LEVEL)
    if scale.dtype is not form.scale.stored_dtype:
        what = "without" if global_scale is None else "beside"
        raise FormatError(f"scale must be {form.scale.stored_dtype} {what} a global scale, not {scale.dtype}")
    if not -qdata.ndim <= block_dim < qdata.ndim:
        raise FormatError(f"block_dim {block_dim} is outside qdata of {qdata.ndim} dimensions")
    expected = list(qdata.shape)
    expected[block_dim] = num_blocks(expected[block_dim] * form.elem.per_byte, form.tile.along)
    if list(scale.shape) != expected:
        raise FormatError(
            f"scale has shape {tuple(scale.shape)}; qdata {tuple(qdata.shape)} in blocks"
            f" of {form.tile.along} along dimension {block_dim} needs {tuple(expected)}"
        )
    if scale.device != qdata.device:
        raise FormatError(f"qdata is on {qdata.device}, scale on {scale.device}")
    if not dtype.is_floating_point:
        raise FormatError(f"an MXTensor stands for floating-point values, not {dtype}")
    if global_scale is not None:
        _check_global(global_scale, qdata, block_dim)
    return form


def _check_global(global_scale: Tensor, qdata: Tensor, block_dim: int) -> None:
    if global_scale.dtype is not torch.float32:
        raise FormatError(f"global_scale must be torch.float32, not {global_scale.dtype}")
    if global_scale.device != qdata.device:
        raise FormatError(f"qdata is on {qdata.device}, global_scale on {global_scale.device}")
    whole = list(qdata.shape)
    whole[block_dim] = 1
    fits = global_scale.ndim == qdata.ndim and all(
        own in (1, size) for own, size in zip(global_scale.shape, whole, strict=True)
    )
    if not fits:
        raise FormatError(
            f"global_scale has shape {tuple(global_scale.shape)}; qdata {tuple(qdata.shape)} in blocks along"
            f" dimension {block_dim} takes one number, or sizes 1 or those of {tuple(whole)}"
        )


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
    """Cast `x` to MXFP8, MXFP4 or NVFP4 in blocks of 32, of NVFP4 16, along `block_dim`.

    x: any float dtype (FP64 is rounded to FP32 first), any rank ≥ 1, any length, for FP4 an even one; a
    short last block is a block. elem_dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`, or
    `torch.float4_e2m1fn_x2` for FP4. rounding, of the scale: ``rceil`` (arXiv 2506.08027), ``floor`` (OCP
    MX v1.0), ``ceil``, ``even``; or ``two-level`` for NVFP4, whose E4M3 scales follow from the amax of `x`
    too. Elements round to nearest even and saturate; a block holding NaN or Inf becomes NaN, of NVFP4 the
    whole tensor. The result has the dtype of `x` and no gradient. Raises `FormatError`.
    """
    check_source(x, block_dim)
    form = stored_form(elem_dtype, rounding)
    qdata, scale_bytes, whole = encode_stored(x.detach(), block_dim, form)
    scale = scale_bytes.view(form.scale.stored_dtype)
    return MXTensor(qdata.view(elem_dtype), scale, block_dim, x.dtype, whole)
