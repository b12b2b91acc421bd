"""`MXTensor`: MXFP8, MXINT8, MXFP4, NVFP4 or FP8 data as a tensor.

    value = element · 2^(byte − 127)            one byte for 32 elements along `block_dim`
    value = element · (scale / global scale)    NVFP4: one E4M3 scale for 16
    value = element · scale                     FP8 of checkpoints: one FP32 scale for 128, or for all

MXFP4 and NVFP4 pack two elements into a byte, the first in the low half. Values were multiplied by the global
scale before the cast, as in compressed-tensors' checkpoints, so their values load exactly.

An `MXTensor` has the shape and dtype of the dense tensor of its values. An operator without a handler (see
`operators`) gets that dense tensor. Autograd, FakeTensor, torch.compile and torch.export trace through it:
qdata and scale bytes are the inputs of a graph. It is storage for inference: gradients are never added to it,
and only `copy_` and an assignment to `data` write to it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from mxcompile import ops
from mxcompile.errors import FormatError
from mxcompile.formats import Format, ScaleType, stored_precision
from mxcompile.formats.encoding import encode_stored
from mxcompile.storage.parts import checked_form, unpacked_layout

log = logging.getLogger(__name__)

_PARTS = ("qdata", "scale_bytes", "global_scale")
_DATA: Any = torch.Tensor.data

HANDLERS: dict[Any, Callable[..., Any]] = {}
"""Handlers that act on an `MXTensor` without dequantizing it, by operator (see `operators`)."""


class MXTensor(Tensor):
    """A tensor in MXFP8, MXINT8, MXFP4, NVFP4 or FP8: elements and the scales of their blocks.

    Attributes:
        qdata: Elements. FP8: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``, in the shape of the source.
            MXINT8: ``torch.int8``, 64 times value over scale. FP4: ``torch.uint8``, two elements per byte,
            half the length along `block_dim`; the constructor takes them as ``torch.float4_e2m1fn_x2``, which
            `elem_dtype` returns.
        scale: Block scales, which multiply in `dequantize`: ``torch.float8_e8m0fnu`` with length ⌈n/32⌉ along
            `block_dim`; for NVFP4, ``torch.float8_e4m3fn`` with length ⌈n/16⌉; for FP8, ``torch.float32``
            with length ⌈n/128⌉ or 1.
        block_dim: The dimension along which blocks run, as passed; a negative number counts from the end.
        dtype: Dtype of the values, in which operators compute.
        global_scale: FP32, for NVFP4 only; divides `scale` in `dequantize`. One number, or a tensor of the
            rank of `qdata` that has length 1 along `block_dim` and may vary along other dimensions, e.g.
            after joining tensors.

    Raises:
        FormatError: The parts are inconsistent.
    """

    qdata: Tensor
    scale_bytes: Tensor
    block_dim: int
    form: Format
    global_scale: Tensor | None
    _word: str  # `str(form)`, which guards of compiled code compare for each weight in each call

    @staticmethod
    def __new__(  # noqa: D102
        cls,
        qdata: Tensor,
        scale: Tensor | None = None,
        block_dim: int = -1,
        dtype: torch.dtype = torch.bfloat16,
        global_scale: Tensor | None = None,
        *,
        requires_grad: bool = False,
    ) -> MXTensor:
        if isinstance(qdata, MXTensor):  # Accelerate calls the type of a parameter like nn.Parameter
            parameter: Any = torch.nn.Parameter(qdata, requires_grad=requires_grad)
            return parameter  # type: ignore[no-any-return]
        if scale is None:
            raise FormatError("an MXTensor needs the scales of its qdata")
        if global_scale is not None and global_scale.numel() == 1:
            global_scale = global_scale.reshape([1] * qdata.ndim)
        form = checked_form(qdata, scale, block_dim, dtype, global_scale)
        elements = qdata.view(torch.uint8) if form.elem.packed else qdata
        scale_bytes = scale if scale.itemsize > 1 else scale.view(torch.uint8)
        return cls._of(elements, scale_bytes, block_dim, dtype, form, global_scale)

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
        """Returns a tensor of these parts, unchecked. scale_bytes: FP32 scales, or scales as uint8."""
        per_byte = form.elem.per_byte
        shape, strides = unpacked_layout(qdata, block_dim, per_byte)
        wrapper: MXTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            shape,
            strides=strides,
            storage_offset=qdata.storage_offset() * per_byte,
            dtype=dtype,
            device=qdata.device,
        )
        wrapper.qdata, wrapper.scale_bytes, wrapper.block_dim = qdata, scale_bytes, block_dim
        wrapper.form, wrapper._word, wrapper.global_scale = form, str(form), global_scale
        return wrapper

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = HANDLERS.get(func)
        result = NotImplemented if handler is None else handler(func, *args, **kwargs)
        if result is not NotImplemented:
            whole = isinstance(result, list | MXTensor)
            return return_and_correct_aliasing(func, args, kwargs, result) if whole else result
        _refuse_mutation(func, args, kwargs)
        stored = (x for x in args if isinstance(x, MXTensor))
        if func in _PRODUCTS and any(type(x.qdata) is Tensor and not x.is_meta for x in stored):  # eager only
            _warn_of_eager()
        dense_args, dense_kwargs = tree_map_only(MXTensor, dense, (tuple(args), kwargs))
        return func(*dense_args, **dense_kwargs)

    @property
    def data(self) -> Tensor:
        """This tensor without autograd. An assigned tensor of any shape is stored in this tensor's format."""
        data: Tensor = _DATA.__get__(self)
        return data

    @data.setter
    def data(self, values: Tensor) -> None:
        if not isinstance(values, MXTensor):
            values = encoded(values, self.block_dim, self.form)
        _DATA.__set__(self, values)
        self.qdata, self.scale_bytes = values.qdata, values.scale_bytes
        self.global_scale = values.global_scale
        self.block_dim, self.form, self._word = values.block_dim, values.form, values._word

    @property
    def scale(self) -> Tensor:
        """The scales, as `torch.float8_e8m0fnu`, `torch.float8_e4m3fn` or `torch.float32`."""
        return self.scale_bytes.view(self.form.scale.stored_dtype)

    @property
    def elem_dtype(self) -> torch.dtype:
        """The dtype of the elements: FP8, `torch.int8`, or `torch.float4_e2m1fn_x2`."""
        return self.form.stored_dtype

    @property
    def block(self) -> int:
        """Number of elements that share a scale."""
        return self.form.tile.along or self.shape[self.block_dim]

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Returns element · scale, computed exactly and rounded once to `dtype`.

        For NVFP4, scale / global scale and its product with the element are each rounded to FP32 first.
        Blocks whose scale is NaN (byte 255) are NaN.

        Args:
            dtype: A floating-point dtype.

        Returns:
            A dense tensor of the same shape, with the stride order of `qdata`.

        Raises:
            FormatError: `dtype` is not a floating-point dtype.
        """
        if not dtype.is_floating_point:
            raise FormatError(f"cannot dequantize to {dtype}: not a floating-point dtype")
        strides = self.qdata.stride()
        order = sorted(range(self.ndim), key=lambda dim: -strides[dim])  # outermost in memory first
        if order == [*range(self.ndim)]:
            return self._decoded(self.block_dim, dtype, lambda part: part)
        dim = order.index(self.block_dim % self.ndim)
        stored = self._decoded(dim, dtype, lambda part: part.permute(order))
        return stored.permute([order.index(dim) for dim in range(self.ndim)])

    def _decoded(self, block_dim: int, dtype: torch.dtype, turned: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the values after `turned` permutes each part, with blocks then along `block_dim`."""
        form = replace(self.form, packed=self.form.elem.packed is not None)
        scale = turned(self.scale_bytes)
        whole = [] if self.global_scale is None else [None, turned(self.global_scale)]
        if whole:
            scale = scale.view(self.form.scale.dtype)
        values: Tensor = ops.decode(turned(self.qdata), scale, block_dim, str(form), dtype, *whole)
        return values

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """qdata, scale bytes, and the global scale if present."""
        whole = () if self.global_scale is None else (self.global_scale,)
        return (self.qdata, self.scale_bytes, *whole)

    def with_parts(
        self,
        change: Callable[[Tensor], Tensor],
        block_dim: int | None = None,
        global_change: Callable[[Tensor], Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> MXTensor:
        """Returns a tensor with changed qdata and scales, and blocks along `block_dim`.

        global_change: change of the global scale, if it differs. dtype: new dtype of the values.
        """
        dim, dtype = self.block_dim if block_dim is None else block_dim, dtype or self.dtype
        whole = None if self.global_scale is None else (global_change or change)(self.global_scale)
        return self._of(change(self.qdata), change(self.scale_bytes), dim, dtype, self.form, whole)

    def of_parts(
        self, qdata: Tensor, scale_bytes: Tensor, block_dim: int, global_scale: Tensor | None
    ) -> MXTensor:
        """Returns a tensor of these parts, with the format and dtype of this tensor."""
        return self._of(qdata, scale_bytes, block_dim, self.dtype, self.form, global_scale)

    @property
    def stored_bytes(self) -> int:
        """Bytes of qdata, scales and global scale."""
        return stored_bytes(self)

    def storage(self) -> Any:
        """Raises `FormatError`, because each part has its own storage. Safetensors calls it at save."""
        raise FormatError(
            "an MXTensor consists of several tensors and has no single storage: save a model with MXTensors"
            " by mxcompile.save_quantized(model, directory), or its state_dict by torch.save"
        )

    def share_memory_(self) -> MXTensor:
        """Moves all parts to shared memory."""
        for part in self.parts:
            part.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether all parts are in shared memory."""
        return all(part.is_shared() for part in self.parts)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[int, torch.dtype, str]]:
        return [*_PARTS[: len(self.parts)]], (self.block_dim, self.dtype, self._word)

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Tensor], context: tuple[int, torch.dtype, str], outer_size: Any, outer_stride: Any
    ) -> MXTensor:
        block_dim, dtype, word = context
        qdata, scale_bytes, whole = map(parts.get, _PARTS)
        assert qdata is not None
        assert scale_bytes is not None
        return MXTensor._of(qdata, scale_bytes, block_dim, dtype, Format.parse(word), whole)

    def _stable_hash_for_caching(self) -> str:
        """Returns the key of this tensor for AOTAutograd's cache."""
        parts = ((part.shape, part.stride(), part.dtype) for part in self.parts)
        about = self.device, self.dtype, self.elem_dtype, str(self.form), self.block_dim, self.requires_grad
        return repr((type(self).__name__, *parts, *about))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles elements as bytes, because not every unpickler supports FP8."""
        kind = bool(self.requires_grad), bool(getattr(self, "_is_param", False))
        qdata, scale_bytes, *whole = self.parts
        about = self.elem_dtype, self.block_dim, self.dtype, *kind
        return _rebuild, (qdata.view(torch.uint8), scale_bytes, *about, *whole)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        elem = f"{stored_precision(self.form)} {self.form.elem}"
        properties = f"{tuple(self.shape)}, {elem}, block_dim={self.block_dim}, dtype={self.dtype}"
        where = "" if self.device.type == "cpu" else f", device={str(self.device)!r}"
        return f"MXTensor({properties}{where})"


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
    """Returns the unpickled tensor. Its parts are checked as in the constructor."""
    kind = ScaleType.E8M0 if global_scale is None else ScaleType.E4M3
    scale = scale_bytes if scale_bytes.itemsize > 1 else scale_bytes.view(kind.stored_dtype)
    result = MXTensor(codes.view(elem_dtype), scale, block_dim, dtype, global_scale)
    result.requires_grad_(requires_grad)
    return torch.nn.Parameter(result, requires_grad=requires_grad) if is_parameter else result


torch.serialization.add_safe_globals([MXTensor, _rebuild])


_PRODUCTS = frozenset({
    torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default, torch.ops.aten.linear.default,
})  # fmt: skip


@functools.cache
def _warn_of_eager() -> None:
    """Warns once that products with stored weights are slow in eager mode."""
    log.warning(
        "a product with a stored weight runs uncompiled: it dequantizes the whole weight in every call, which"
        ' is many times slower than BF16; compile the model with torch.compile(model, backend="mxfp8")'
    )


def encoded(x: Tensor, block_dim: int, form: Format) -> MXTensor:
    """Returns `x`, cast to `form` in blocks along `block_dim`."""
    qdata, scale_bytes, whole = encode_stored(x.detach(), block_dim, form)
    scale = scale_bytes.view(form.scale.stored_dtype)
    return MXTensor(qdata.view(form.stored_dtype), scale, block_dim, x.dtype, whole)


def dense(x: MXTensor) -> Tensor:
    """Returns the dense tensor of the values of `x`."""
    return x.dequantize(x.dtype)


def _refuse_mutation(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raises `FormatError` if `func` writes to an `MXTensor`; c10d schemas do not mark writes."""
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


def stored_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Returns the plain tensors that store `tensor`: sparse, nested, a subclass of parts, or plain itself."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    if tensor.is_nested:
        return (tensor.values(),)
    if not is_traceable_wrapper_subclass(tensor) or hasattr(tensor, "placements"):  # a DTensor counts whole
        return (tensor,)
    return tuple(p for name in tensor.__tensor_flatten__()[0] for p in stored_parts(getattr(tensor, name)))


def stored_bytes(tensor: Tensor) -> int:
    """Returns the bytes of `tensor` as stored; a sparse tensor counts with its indices."""
    return sum(part.nbytes for part in stored_parts(tensor))
