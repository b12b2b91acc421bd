"""Sets of operators the passes tell apart, each defined once, here.

An operator that is in no set is treated as elementwise by the data flow (it passes on what reaches it)
and is never looked through.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
prims = torch.ops.prims


def _packets(namespace: Any, *names: str) -> frozenset[Any]:
    """The operators of `names` that this torch has."""
    return frozenset(getattr(namespace, name) for name in names if hasattr(namespace, name))


MATMULS = _packets(aten, "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "linear", "_grouped_mm")
"""Operators that are one matrix product of their floating-point operands."""

QUANTIZED_MATMULS = _packets(
    aten, "_scaled_mm", "_scaled_mm_v2", "_scaled_grouped_mm", "_scaled_grouped_mm_v2", "_int_mm",
    "_weight_int4pack_mm", "_weight_int8pack_mm",
)  # fmt: skip
"""Products whose operands the model itself has quantized."""

ATTENTION_FORWARD = _packets(
    aten, "scaled_dot_product_attention", "_scaled_dot_product_attention_math",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward",
    "_efficient_attention_forward",
) | _packets(torch.ops.higher_order, "flex_attention")  # fmt: skip
"""softmax(q·kᵀ)·v in one node; q, k, v are the first three arguments."""

ATTENTION_BACKWARD = _packets(
    aten, "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_fused_attention_overrideable_backward", "_flash_attention_backward",
    "_efficient_attention_backward",
) | _packets(torch.ops.higher_order, "flex_attention_backward")  # fmt: skip
"""Gradients of ATTENTION_FORWARD."""

OPAQUE = _packets(
    aten, "_transformer_encoder_layer_fwd", "_native_multi_head_attention", "_trilinear",
    "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "lstm", "gru", "_cudnn_rnn",
    "_cudnn_rnn_backward", "miopen_rnn", "_thnn_fused_lstm_cell",
)  # fmt: skip
"""Operators with matrix products inside that no pass can reach."""

OPAQUE_NAMES = frozenset(
    {
        "transformers.grouped_mm_fallback",
        "transformers.grouped_mm_fallback_backward",
    }
)
"""The same for operators of other libraries, by qualified name."""

_MATMUL_LIKE = MATMULS | QUANTIZED_MATMULS | ATTENTION_FORWARD | ATTENTION_BACKWARD | OPAQUE


def is_opaque(node: fx.Node) -> bool:
    """Whether `node` hides matrix products."""
    what = packet(node)
    return what in OPAQUE or str(what) in OPAQUE_NAMES


def is_matmul_like(node: fx.Node) -> bool:
    """Whether `node` must end up in the report."""
    return packet(node) in _MATMUL_LIKE or is_opaque(node)


VIEWS = _packets(
    aten, "view", "reshape", "_unsafe_view", "permute", "transpose", "t", "expand", "squeeze",
    "unsqueeze", "alias", "slice", "select", "split", "split_with_sizes", "unbind", "as_strided",
    "detach", "view_as_real", "view_as_complex", "chunk", "unflatten",
)  # fmt: skip
"""Same values, another shape."""

CASTS = _packets(prims, "convert_element_type") | _packets(aten, "_to_copy", "to")

COPIES = _packets(aten, "clone", "contiguous", "lift_fresh_copy")

TRANSPARENT = VIEWS | CASTS | COPIES
"""What a tensor can pass through and still be the same tensor."""

LINEAR_OPS = TRANSPARENT | _packets(
    aten, "add", "sub", "rsub", "mul", "div", "neg", "cat", "stack", "where", "masked_fill",
    "index", "index_select", "gather", "native_dropout", "dropout", "roll", "flip",
    "constant_pad_nd", "repeat", "slice_scatter", "select_scatter", "addcmul", "lerp", "copy",
    "index_put", "clamp",
) | frozenset({operator.getitem})  # fmt: skip
"""What keeps a projection a projection: rotary embedding, scaling, masking, normalisation by a factor."""

ACTIVATIONS = _packets(
    aten, "sigmoid", "tanh", "erf", "erfc", "relu", "gelu", "silu", "leaky_relu", "elu", "hardtanh",
    "hardswish", "hardsigmoid", "softplus", "mish", "maximum", "minimum", "clamp_min", "relu6",
    "log_sigmoid_forward", "threshold", "prelu", "celu", "selu", "sin", "cos", "exp", "gt", "ge",
    "lt", "le",
)  # fmt: skip
"""Elementwise nonlinearities a feed-forward network has in its middle, whole or decomposed.

Norms have none of them: they multiply by a factor made of sums and roots."""

GATHERS = _packets(aten, "index", "index_select", "gather", "embedding")

TOP_K = _packets(aten, "topk", "sort", "argmax", "kthvalue")

SOFTMAX = _packets(aten, "_softmax", "_safe_softmax", "softmax", "special_softmax")

MAXIMA = _packets(aten, "amax", "max") | _packets(prims, "prepare_softmax_online")
"""What a decomposed softmax subtracts before its exponential."""

SUMS = _packets(aten, "add", "sub", "rsub")
"""What joins a branch to a residual stream."""

RANDOM = _packets(aten, "rand", "randn", "rand_like", "randn_like", "bernoulli", "native_dropout")

STREAM_SOURCES = _packets(aten, "embedding", "convolution", "_embedding_bag")
"""What starts a residual stream, beside floating-point inputs."""


def argument(node: fx.Node, index: int = 0) -> fx.Node:
    """The positional argument of `node` at `index`, which must be a node itself."""
    found = node.args[index]
    assert isinstance(found, fx.Node), f"argument {index} of {node.name} is no node"
    return found


def packet(node: fx.Node) -> Any:
    """The operator of a call, without its overload: what the sets hold. None for other nodes."""
    if node.op != "call_function":
        return None
    return getattr(node.target, "_overloadpacket", node.target)
