"""Operators of delayed scaling, where scales depend on the state of a layer from earlier calls.

    tapped       w, state → w, slot            on each weight of Dynamo's graph; the passes remove it
    slot         state → the amaxes of x, w and dy in this call, [3]        passes replace it by values
    largest      x → max |x|, FP32 [1]; with `dim`, of each row along it, which gets size 1
    mean         state, amax → decay · state + (1 − decay) · amax; amax if the state is 0, the state if amax
                 is not finite
    known_scale  state or another tensor of amaxes → the FP32 scales for the amaxes in one of its rows

A state is FP32 [3]: the amaxes from which the scales of x, w and dy are derived; 0 before the first call. It
is a differentiable input of the graph. Its "gradient" is the slot of backward, because only backward has the
amax of dy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxcompile.formats import AmaxKind, Format, Tile
from mxcompile.formats.encoding import fp32_scale, scale_shape, tensor_amax
from mxcompile.ops.define import LIBRARY, define

OPERANDS = ("x", "w", "dy")
"""The operands of a layer, in the order of its state."""


def _tapped(w: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return w.clone(), torch.zeros_like(state)


def _mean(state: Tensor, row: int, amax: Tensor, fmt: str) -> Tensor:
    decay, before = Format.parse(fmt).amax.value, state[row : row + 1]
    mean = decay * before + (1 - decay) * amax
    return torch.where(before == 0, amax, torch.where(amax.isfinite(), mean, before))


def _scale_of_row(state: Tensor, row: int, fmt: str, ndim: int) -> Tensor:
    form = Format.parse(fmt)
    margin = 2.0**form.amax.margin if form.amax.kind is AmaxKind.DELAYED else 1.0
    return fp32_scale(state[row] * margin, form).reshape(_shape_of_row(state, ndim))


def _shape_of_row(state: Tensor, ndim: int) -> list[Any]:
    """Returns the shape of a row of `state`, with sizes of 1 in front up to `ndim` dimensions."""
    return [1] * (ndim - state.ndim + 1) + list(state.shape[1:])


def _save_state(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[1])


def _gradients(ctx: Any, dw: Tensor, _: Any) -> tuple[Tensor, Tensor]:
    return dw, slot(*ctx.saved_tensors)


slot = define("slot(Tensor state) -> Tensor", torch.zeros_like, lambda state: [(state.shape, state.dtype)])
largest = define(
    "largest(Tensor x, int? dim=None) -> Tensor",
    tensor_amax,
    lambda x, dim=None: [((1,) if dim is None else scale_shape(x.shape, dim, Tile.CHANNEL), torch.float32)],
)
mean = define(
    "mean(Tensor state, int row, Tensor amax, str fmt) -> Tensor",
    _mean,
    lambda state, row, amax, fmt: [((1,), torch.float32)],
)
known_scale = define(
    "known_scale(Tensor state, int row, str fmt, int ndim) -> Tensor",
    _scale_of_row,
    lambda state, row, fmt, ndim: [(_shape_of_row(state, ndim), torch.float32)],
)

LIBRARY.define("tapped(Tensor w, Tensor state) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl("tapped", _tapped, "CompositeExplicitAutograd")
torch.library.register_fake("mx::tapped", _tapped, lib=LIBRARY)
torch.library.register_autograd("mx::tapped", _gradients, setup_context=_save_state, lib=LIBRARY)
tapped = torch.ops.mx.tapped.default
