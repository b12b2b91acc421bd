"""Copies of weights that are kept from call to call, and how it is told that one is still good.

    copy of w  =  the one made before                 if a fingerprint of all bytes of w is what it was then
                  a new one, a new tensor             otherwise

Nothing else is trusted: not versions, which writes through ``.data`` and from C++ leave as they are, and not
addresses, at which FSDP2 puts other weights. A change goes unseen with a probability of 2⁻⁶⁴, whatever the
change, as the key is random (see ``fingerprint.h``). A copy is never written to again, so whoever still holds
an old one, a forward that is running or a graph that saved it, holds what it was given.

Copies live as long as the storage of their weight: one for each view of it and way to cast it.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._inductor.codecache import CppPythonBindingsCodeCache

from mxcompile.formats import Rounding, elem_type, num_blocks
from mxcompile.lowering.cpu.casts import Cast
from mxcompile.lowering.cpu.kernel import C_TYPES, text
from mxcompile.ops.define import LIBRARY

_CHUNK_BYTES = 8192
_KEY_WORDS = _CHUNK_BYTES // 8 + 1

Made = tuple[Tensor, ...]
"""What one way to cast a weight gives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Copy:
    fingerprint: Tensor
    made: Made


@dataclass(slots=True)
class Copies:
    """All copies of the process. checks: how often one was asked for; casts: how often it had to be made."""

    checks: int = 0
    casts: int = 0
    _of_storage: WeakKeyDictionary[Any, dict[Any, _Copy]] = field(default_factory=WeakKeyDictionary)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def of(self, w: Tensor, cast: Cast) -> Made:
        """`w` cast so."""
        with self._lock:
            own = self._of_storage.setdefault(w.untyped_storage(), {})
            key = w.storage_offset(), tuple(w.shape), w.stride(), w.dtype, cast
            w = w.detach().contiguous()
            now, found = fingerprint(w), own.pop(key, None)
            self.checks += 1
            if found is None or not torch.equal(found.fingerprint, now):
                found = None  # what nobody holds any more makes room first
                self.casts += 1
                found = _Copy(fingerprint=now, made=_made(w, cast))
            own[key] = found
            return found.made

    @property
    def num_bytes(self) -> int:
        """Of all copies."""
        with self._lock:
            made = [each for own in self._of_storage.values() for copy in own.values() for each in copy.made]
            return sum(each.numel() * each.element_size() for each in made)

    def clear(self) -> None:
        """Forget all copies; they are made again when they are asked for."""
        with self._lock:
            self._of_storage.clear()


COPIES = Copies()


@functools.cache
def _key() -> Tensor:
    """Random, of this process: whoever knows it can make changes that are not seen."""
    return torch.frombuffer(bytearray(os.urandom(8 * _KEY_WORDS)), dtype=torch.int64)


def fingerprint(w: Tensor) -> Tensor:
    """Of the bytes of `w`, contiguous: int64 [chunks of 8 KiB, 2]."""
    num_bytes = w.numel() * w.element_size()
    sums = _empty((-(-num_bytes // _CHUNK_BYTES), 2), torch.int64)
    _fingerprint()(w.data_ptr(), num_bytes, _key().data_ptr(), torch.get_num_threads(), sums.data_ptr())
    return sums


def _made(w: Tensor, cast: Cast) -> Made:
    """New tensors: values, or codes and scales."""
    shape, dim, last = w.shape, cast.dim, w.ndim - 1
    along = dim == last
    if cast.value_dtype is not None:
        made: Made = (_empty(shape, cast.value_dtype),)
        pointers = made[0].data_ptr(), 0, 0
    else:
        scale_shape = [*shape[:dim], num_blocks(shape[dim]), *shape[dim + 1 :]]
        made = _empty(shape, cast.elem.dtype), _empty(scale_shape, torch.uint8)
        pointers = 0, made[0].data_ptr(), made[1].data_ptr()
    if along and cast.square:
        dim = last - 1  # a tile's elements are those along columns, its scales those along rows
    sizes = math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :])
    kernel = _kernel(w.dtype, replace(cast, dim=0))
    kernel(w.data_ptr(), *sizes, int(not along), torch.get_num_threads(), *pointers)
    return made


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """New, and fit for training whatever the mode of the call that is the first to need it."""
    with torch.inference_mode(mode=False):
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")


def build(source: torch.dtype, cast: Cast) -> None:
    """Compile what `of` needs for weights of dtype `source`, ahead of its first call."""
    _fingerprint()
    _kernel(source, replace(cast, dim=0))


@functools.cache
def _fingerprint() -> Callable[..., None]:
    body = (
        "auto x = reinterpret_cast<const uint8_t*>(a0); auto key = reinterpret_cast<const uint64_t*>(a2);"
        " mxcompile::fingerprint(x, a1, key, a3, reinterpret_cast<uint64_t*>(a4));"
    )
    return _compiled("fingerprint.h", body, "pipip")


@functools.cache
def _kernel(source: torch.dtype, cast: Cast) -> Callable[..., None]:
    """A function of x, three sizes, whether blocks run along columns, threads, values, codes and scales.

    It serves every dimension; that of `cast` is not read.
    """
    function, value = cast.function(source), C_TYPES[cast.value_dtype or source]
    rows = f"{function}::matrices<true>(x, a1, a2, a3, a5, elements, rest)" if cast.square else ""
    rows = rows or f"{function}::rows(x, a1, a2, a5, all)"
    results = f"mxcompile::Results<{value}>"
    body = f"""
    auto x = reinterpret_cast<const {C_TYPES[source]}*>(a0);
    auto values = reinterpret_cast<{value}*>(a6);
    auto codes = reinterpret_cast<uint8_t*>(a7), scales = reinterpret_cast<uint8_t*>(a8);
    {results} all{{values, codes, scales}}, none{{nullptr, nullptr, nullptr}};
    {results} elements{{values, codes, nullptr}}, rest{{nullptr, nullptr, scales}};
    if (a4) {function}::matrices<{str(cast.square).lower()}>(x, a1, a2, a3, a5, all, none);
    else {rows};
    """
    return _compiled("casts.h", body, "piiiiippp")


def _compiled(header: str, body: str, kinds: str) -> Callable[..., None]:
    """A function of a0, a1, …, each a pointer or an integer, built as Inductor builds its own."""
    types = ["uintptr_t" if kind == "p" else "int64_t" for kind in kinds]
    parameters = ", ".join(f"{type_} a{index}" for index, type_ in enumerate(types))
    source = f'{text(header)}\nextern "C" void kernel({parameters})\n{{\n{body}\n}}\n'
    made: Callable[..., None] = CppPythonBindingsCodeCache.load_pybinding(types, source)
    return made


def _quantize(
    w: Tensor, block_dim: int, elem_dtype: torch.dtype, rounding: str, square: bool
) -> tuple[Tensor, Tensor]:
    qdata, scale = COPIES.of(w, cast_of(w.ndim, block_dim, elem_dtype, rounding, square))
    return qdata, scale


def _values(
    w: Tensor, block_dim: int, elem_dtype: torch.dtype, rounding: str, square: bool, dtype: torch.dtype
) -> Tensor:
    (values,) = COPIES.of(w, cast_of(w.ndim, block_dim, elem_dtype, rounding, square, dtype))
    return values


def cast_of(
    rank: int,
    block_dim: int,
    elem_dtype: torch.dtype,
    rounding: str,
    square: bool,
    dtype: torch.dtype | None = None,
) -> Cast:
    """How the operators cast a weight of so many dimensions, from their other arguments."""
    return Cast(
        dim=block_dim % rank,
        elem=elem_type(elem_dtype),
        rounding=Rounding(rounding),
        square=square,
        value_dtype=dtype,
    )


LIBRARY.impl("quantize_cached", _quantize, "CPU")
LIBRARY.impl("quantize_dequantize_cached", _values, "CPU")
