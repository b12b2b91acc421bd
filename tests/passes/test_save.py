"""The pass `save`: which casts of a layer's input backward makes again."""

from __future__ import annotations

import pytest
import torch
from by_hand import Hand
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from mxcompile import ops
from mxcompile.formats import Format
from mxcompile.graph.opsets import aten
from mxcompile.passes.save import Save
from mxcompile.policy import Gemm, Saved

E4M3, FP32 = torch.float8_e4m3fn, torch.float32
WORDS = (str(Format()), str(Format()))


def quantized(hand: Hand, x: fx.Node, dim: int) -> tuple[fx.Node, fx.Node, fx.Node]:
    cast = hand.quantize(x, dim, E4M3, "rceil")
    return cast, *hand.parts(cast)


def wgrad(hand: Hand, x: fx.Node, saved: Saved, *, dim: int = 0) -> fx.Node:
    """dyᵀ[64, 96] · x[96, 32], with `x` cast along `dim`; returns the cast of `x`."""
    _, dy, dy_scale = quantized(hand, hand.input("dy", 64, 96), -1)
    cast, qdata, scale = quantized(hand, x, dim)
    formats = Format(), Format()
    hand.gemm(
        ops.matmul, dy, dy_scale, qdata, scale, None, FP32, *WORDS, gemm=Gemm.WGRAD, tensors=("dy", "x"),
        formats=formats, saved=saved,
    )  # fmt: skip
    return cast


def is_made_again(cast: fx.Node) -> bool:
    return cast.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE


@pytest.mark.parametrize(("saved", "recomputed"), [("columnwise", False), ("mxfp8", False), ("bf16", True)])
def test_only_inputs_saved_as_source_are_cast_in_backward(saved: str, recomputed: bool):
    hand = Hand()
    cast = wgrad(hand, hand.input("x", 96, 32), Saved(saved))
    Save().apply(hand.output())
    assert is_made_again(cast) is recomputed


def test_values_of_the_rowwise_copy_are_recomputed_under_transcode():
    hand = Hand()
    x = hand.input("x", 96, 32)
    _, qdata, scale = quantized(hand, x, -1)
    values = hand.call(ops.decode, qdata, scale, -1, "e4m3 1x32 rceil", FP32)
    casts = wgrad(hand, values, Saved.TRANSCODE), wgrad(hand, x, Saved.TRANSCODE)
    Save().apply(hand.output())
    assert is_made_again(values)
    assert not any(map(is_made_again, casts))


def test_a_cast_that_forward_reads_too_is_made_there():
    """fprop contracts the dimension that wgrad does: x is a square matrix that is read transposed."""
    hand = Hand()
    cast = wgrad(hand, hand.input("x", 96, 32), Saved.BF16)
    qdata, scale = cast.users
    x_codes, x_scale = (hand.call(aten.permute.default, node, [1, 0]) for node in (qdata, scale))
    _, w, w_scale = quantized(hand, hand.input("w", 96, 64), 0)
    hand.gemm(ops.matmul, x_codes, x_scale, w, w_scale, None, FP32, *WORDS, formats=(Format(), Format()))
    Save().apply(hand.output())
    assert not is_made_again(cast)
