"""`MXStaticCache`: a static cache of Hugging Face models that stores keys and values in MXFP8 or MXINT8.

    update(k, v)  →  write quantize(k), quantize(v) along head_dim; return the values of all keys and values

A row is a byte for each of its head_dim values and an E8M0 byte for every 32: 33 bytes instead of 64 in BF16.
Attention gets values. In a compiled graph, `lowering.graph.cached_attention` lets an attention with few
queries read qdata instead. Layers with a sliding window or recurrent state, and layers that share another
layer's keys, stay as transformers creates them; `MXStaticCache.kept` has the reason for each.

Scales use RCEIL, the default for activations. The cache is for inference only.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache
from transformers.cache_utils import StaticLayer

from mxcompile import ops
from mxcompile.errors import ModelError, UnsupportedError
from mxcompile.formats import Copy, Format, stored_precision

log = logging.getLogger(__name__)

_MXFP8 = Format()
_BUFFERS = ("key_codes", "key_scales", "value_codes", "value_scales")


class MXStaticLayer(StaticLayer):  # type: ignore[no-untyped-call, misc, unused-ignore]
    """The keys and values of one layer. Its buffers exist after the first update.

    Attributes:
        key_codes: Elements as bytes, [batch, heads, max_cache_len, head_dim].
        key_scales: E8M0 bytes, [batch, heads, max_cache_len, ⌈head_dim/32⌉].
        value_codes: As `key_codes`.
        value_scales: As `key_scales`.
    """

    key_codes: Tensor
    key_scales: Tensor
    value_codes: Tensor
    value_scales: Tensor

    def __init__(self, max_cache_len: int, form: Format = _MXFP8) -> None:
        """Takes the number of rows, and the format of a stored row."""
        super().__init__(max_cache_len=max_cache_len)
        self._form, self._copy, self._elements = str(form), str(Copy(format=form)), form.elem.dtype

    @property
    def keys(self) -> Tensor | None:
        """Keys of all rows, dequantized at each access; None before the first update."""
        return self._values(self.key_codes, self.key_scales) if self.is_initialized else None

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        self._nothing(value)

    @property
    def values(self) -> Tensor | None:
        """Values of all rows, dequantized at each access; None before the first update."""
        return self._values(self.value_codes, self.value_scales) if self.is_initialized else None

    @values.setter
    def values(self, value: Tensor | None) -> None:
        self._nothing(value)

    @property
    def stored_bytes(self) -> int:
        """Bytes of qdata and scales; 0 before the first update."""
        return sum(buffer.nbytes for buffer in self._buffers())

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates zeroed buffers for keys and values with these heads, head sizes, dtype and device."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size, self.num_heads = key_states.shape[:2]
        self.k_head_dim, self.v_head_dim = key_states.shape[-1], value_states.shape[-1]
        self.key_codes, self.key_scales = self._zeros(self.k_head_dim)
        self.value_codes, self.value_scales = self._zeros(self.v_head_dim)
        self.cumulative_length = self.cumulative_length.to(self.device)
        self.is_initialized = True
        if not torch.compiler.is_compiling():
            for buffer in (*self._buffers(), self.cumulative_length):
                torch._dynamo.mark_static_address(buffer)  # CUDA graphs then read it in place

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Stores the next rows, [batch, heads, rows, head_dim]. Returns all keys and values, dequantized.

        Raises:
            UnsupportedError: The rows require gradients.
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise UnsupportedError(
                "a quantized cache gives no gradients: call the model under torch.no_grad()"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows = key_states.shape[-2]
        places = torch.arange(rows, device=self.device) + self.cumulative_length
        self.cumulative_length.add_(rows)
        self._write(self.key_codes, self.key_scales, places, key_states)
        self._write(self.value_codes, self.value_scales, places, value_states)
        keys = self._values(self.key_codes, self.key_scales)
        return keys, self._values(self.value_codes, self.value_scales)

    def reset(self) -> None:
        """Sets all rows to zero."""
        for buffer in self._buffers():
            buffer.zero_()
        self.cumulative_length.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Copies to each sequence of the batch the rows of the sequence that `beam_idx` selects for it."""
        for buffer in self._buffers():
            buffer.copy_(buffer.index_select(0, beam_idx.to(buffer.device)))

    def offload(self) -> None:
        """Moves the rows to CPU memory."""
        self._move("cpu")

    def prefetch(self) -> None:
        """Moves the rows back to their device."""
        if self.is_initialized:
            self._move(self.device)

    def _move(self, device: torch.device | str) -> None:
        for name in _BUFFERS if self.is_initialized else ():
            setattr(self, name, getattr(self, name).to(device, non_blocking=True))

    def _buffers(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in _BUFFERS) if self.is_initialized else ()

    def _zeros(self, head_dim: int) -> tuple[Tensor, Tensor]:
        shape = (self.batch_size, self.num_heads, self.max_cache_len)
        codes = torch.zeros((*shape, head_dim), dtype=torch.uint8, device=self.device)
        return codes, torch.zeros((*shape, -(-head_dim // 32)), dtype=torch.uint8, device=self.device)

    def _write(self, codes: Tensor, scales: Tensor, places: Tensor, rows: Tensor) -> None:
        elements, bytes_ = ops.cast(rows, [self._copy])
        codes.index_copy_(2, places, elements.view(torch.uint8))
        scales.index_copy_(2, places, bytes_)

    def _values(self, codes: Tensor, scales: Tensor) -> Tensor:
        values: Tensor = ops.decode(codes.view(self._elements), scales, -1, self._form, self.dtype)
        return values

    def _nothing(self, value: object) -> None:
        if value is not None:
            raise AttributeError("keys and values cannot be set: call `update` to write them")


class MXStaticCache(StaticCache):  # type: ignore[misc, unused-ignore]
    """A `transformers.StaticCache` in about half the bytes; see `mxcompile.static_cache`.

    Attributes:
        kept: By layer number, the reason why a layer stays as transformers creates it.
    """

    def __init__(self, config: Any, max_cache_len: int, form: Format = _MXFP8, **options: Any) -> None:
        """Takes the arguments of `transformers.StaticCache`, and the format of stored rows.

        Raises:
            ModelError: No layer of the model has keys and values that can be stored in `form`.
        """
        super().__init__(config, max_cache_len, **options)
        self.kept = {index: why for index, layer in enumerate(self.layers) if (why := _obstacle(layer))}
        if len(self.kept) == len(self.layers):
            raise ModelError(
                f"no layer of {type(config).__name__} can store its keys and values in"
                f" {stored_precision(form).label}:"
                f" {'; '.join(sorted(set(self.kept.values())))}. Use transformers.StaticCache"
            )
        total = len(self.layers)
        for reason, kept in sorted(Counter(self.kept.values()).items()):
            log.warning("%d of %d layers keep their keys and values as they are: %s", kept, total, reason)
        for index in {*range(total)} - self.kept.keys():
            self.layers[index] = MXStaticLayer(max_cache_len, form)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the stored layers; 0 before the first update."""
        return sum(layer.stored_bytes for layer in self.layers if isinstance(layer, MXStaticLayer))


def _obstacle(layer: object) -> str:
    """Returns why the keys and values of `layer` cannot be stored, "" if they can."""
    if type(layer) is StaticLayer:
        return ""
    if getattr(layer, "is_sliding", False):
        return "a layer with a sliding window stores the window alone"
    return f"a {type(layer).__name__} is not a plain store of keys and values"
