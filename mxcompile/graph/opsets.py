"""Sets of operators shared by passes, each defined once. Sets of a single pass are in that pass.

Attention operators are rows of `attention`. The data flow treats an operator outside all sets as elementwise
(it propagates its inputs) and never looks through it.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

try:
    from torch._library.custom_ops import OPDEFS
except ImportError:  # without this private name, the code of custom operators is not searched
    OPDEFS = {}  # type: ignore[assignment]

from mxcompile.graph.attention import ATTENTIONS
from mxcompile.graph.tags import tensor
from mxcompile.ops.view import argument_of, call_of

aten = torch.ops.aten
prims = torch.ops.prims


def _packets(namespace: Any, *names: str) -> frozenset[Any]:
    """Returns the operators called `names` that this torch version has."""
    return frozenset(getattr(namespace, name) for name in names if hasattr(namespace, name))


MATMULS = _packets(
    aten, "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "linear", "_grouped_mm", "addbmm", "_sparse_mm",
    "_sparse_addmm",
)  # fmt: skip
"""Operators that are one matrix product of their floating-point operands."""

BIASED = _packets(aten, "addmm", "baddbmm", "addmv", "addbmm", "_sparse_addmm")
"""Matrix products whose first argument is added to the result."""

GROUPED_FALLBACK = "transformers.grouped_mm_fallback"
GROUPED_FALLBACK_BACKWARD = "transformers.grouped_mm_fallback_backward"
"""Hugging Face's expert products for dtypes that `aten._grouped_mm` lacks (FP32), and their gradients."""

CONVOLUTION_BACKWARD = _packets(aten, "convolution_backward")

CONVOLUTIONS = _packets(aten, "convolution") | CONVOLUTION_BACKWARD
"""Products of a weight with patches or pixels of an image."""

QUANTIZED_MATMULS = _packets(
    aten, "_scaled_mm", "_scaled_mm_v2", "_scaled_grouped_mm", "_scaled_grouped_mm_v2", "_int_mm",
    "_weight_int4pack_mm", "_weight_int8pack_mm",
)  # fmt: skip
"""Products whose operands the model itself has quantized."""

OPAQUE = _packets(
    aten, "_transformer_encoder_layer_fwd", "_native_multi_head_attention", "_trilinear",
    "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "lstm", "gru", "rnn_tanh", "rnn_relu", "_cudnn_rnn",
    "_cudnn_rnn_backward", "miopen_rnn", "miopen_rnn_backward",
)  # fmt: skip
"""Operators that contain matrix products which no pass can reach."""

_KNOWN_LIBRARIES = frozenset(
    {
        "aten", "prim", "prims", "mx", "inductor", "higher_order", "c10d", "_c10d_functional",
        "_c10d_functional_autograd", "_dtensor", "fsdp", "symm_mem", "rngprims", "debugprims", "profiler",
        "quantized_decomposed", "bucketing", "streams",
    }
)  # fmt: skip
"""Libraries whose matrix products are all in a set of this module."""
_FOREIGN_HIGHER_ORDER = frozenset(
    {"triton_kernel_wrapper_functional", "triton_kernel_wrapper_mutation", "invoke_leaf_function"}
)

_MATMUL_LIKE = MATMULS.union(QUANTIZED_MATMULS, ATTENTIONS, OPAQUE)


def is_grouped(node: fx.Node) -> bool:
    """Whether `node` is a grouped product or its gradients."""
    op_packet = packet(node)
    return op_packet is aten._grouped_mm or str(op_packet) in (GROUPED_FALLBACK, GROUPED_FALLBACK_BACKWARD)


def is_matmul(node: fx.Node) -> bool:
    """Whether `node` is one matrix product: a matmul, a convolution, or one gradient of either."""
    op_packet = packet(node)
    if op_packet in CONVOLUTION_BACKWARD:
        return any(argument_of(node, "output_mask")[:2])
    return op_packet in MATMULS or op_packet in CONVOLUTIONS or is_grouped(node)


def is_foreign(node: fx.Node) -> bool:
    """Whether `node` calls an operator of another library that may contain matrix products.

    An operator may contain a product if it has two floating-point matrices as operands, or a single matrix as
    operand and another matrix in its code.
    """
    if node.op != "call_function":
        return False
    called, _ = call_of(node)
    if not is_of_other_library(called) and getattr(called, "__name__", "") not in _FOREIGN_HIGHER_ORDER:
        return False
    return is_foreign_call(called, map(tensor, node.all_input_nodes))


def is_of_other_library(called: Any) -> bool:
    """Whether `called` is an operator of a library whose products this module does not list."""
    is_operator = isinstance(called, torch._ops.OpOverload | torch._ops.OpOverloadPacket)
    return is_operator and str(called).partition(".")[0] not in _KNOWN_LIBRARIES


def is_foreign_call(called: Any, values: Iterable[Tensor | None]) -> bool:
    """Whether the arguments `values` and the code of the operator `called` show that it may be a product."""
    operands = sum(value is not None and value.is_floating_point() and value.ndim > 1 for value in values)
    return operands > 1 or (operands == 1 and bool(matrices_in_code(called)))


def matrices_in_code(called: Any) -> list[Tensor]:
    """Returns the floating-point matrices in closures and globals of the Python code of a custom operator."""
    name = str(getattr(called, "_schema", "")).partition("(")[0].partition(".")[0]
    if (definition := OPDEFS.get(name)) is None:
        return []
    try:
        variables = inspect.getclosurevars(definition._init_fn)
    except (TypeError, ValueError):  # not a Python function, or one of its variables has no value yet
        return []
    values = tree_leaves([variables.nonlocals, variables.globals])
    modules = (value.parameters() for value in values if isinstance(value, nn.Module))
    tensors = (value for value in [*values, *chain.from_iterable(modules)] if isinstance(value, Tensor))
    return [value for value in tensors if value.is_floating_point() and value.ndim > 1]


def may_be_product(target: Any) -> bool:
    """Whether a call of the overload `target` may be matmul-like, judged without its arguments."""
    op_packet = target._overloadpacket
    return op_packet in _MATMUL_LIKE or op_packet in CONVOLUTIONS or is_of_other_library(target)


@functools.cache
def is_elementary(target: Any) -> bool:
    """Whether no call of `target` is matmul-like. Cached, because most nodes call a few such operators."""
    if target is operator.getitem:
        return True
    return isinstance(target, torch._ops.OpOverload) and not may_be_product(target)


def is_opaque(node: fx.Node) -> bool:
    """Whether `node` contains, or may contain, hidden matrix products."""
    return packet(node) in OPAQUE or is_foreign(node)


def is_matmul_like(node: fx.Node) -> bool:
    """Whether `node` is or may contain a matrix product, so that the report must list it."""
    if node.op == "call_function" and is_elementary(node.target):
        return False
    return packet(node) in _MATMUL_LIKE or is_matmul(node) or is_foreign(node)


def gradient_index(node: fx.Node) -> int:
    """Returns the index of the only gradient of `node` that is read (see `passes/split`)."""
    user = next(iter(node.users), None)
    index = user.args[1] if user is not None and packet(user) is operator.getitem else 0
    assert isinstance(index, int)
    return index


VIEWS = _packets(
    aten, "view", "reshape", "_unsafe_view", "permute", "transpose", "t", "expand", "squeeze",
    "unsqueeze", "alias", "slice", "select", "split", "split_with_sizes", "unbind", "as_strided",
    "detach", "view_as_real", "view_as_complex", "chunk", "unflatten",
)  # fmt: skip
"""Operators that return the same values in another shape."""

RESHAPES = _packets(
    aten, "view", "reshape", "_unsafe_view", "permute", "transpose", "t", "squeeze", "unsqueeze", "alias",
    "detach", "unflatten",
)  # fmt: skip
"""Views that contain every element exactly once."""

SIZED_VIEWS = _packets(aten, "view", "reshape", "_unsafe_view")
"""Views with explicit sizes that keep the order of elements."""

CONVERSIONS = _packets(prims, "convert_element_type") | _packets(aten, "_to_copy", "to")
"""Changes of dtype by the model or autocast. Casts to quantized formats are `ops.CASTS`."""

COPIES = _packets(aten, "clone", "contiguous", "lift_fresh_copy")

CONJUGATES = _packets(aten, "_conj", "conj", "_conj_physical", "conj_physical", "resolve_conj")
"""Complex conjugates; for real tensors, the identity."""

TRANSPARENT = VIEWS | CONVERSIONS | COPIES
"""Operators whose result counts as the same tensor as their input."""

LINEAR_OPS = TRANSPARENT | _packets(
    aten, "add", "sub", "rsub", "mul", "div", "neg", "cat", "stack", "where", "masked_fill", "index",
    "index_select", "gather", "native_dropout", "dropout", "roll", "flip", "constant_pad_nd", "repeat",
    "slice_scatter", "select_scatter", "addcmul", "lerp", "copy", "index_put", "index_add", "scatter",
    "scatter_add", "scatter_reduce", "select_backward", "slice_backward", "clamp", "sum", "mean",
    "convolution", "avg_pool1d", "avg_pool2d", "max_pool2d_with_indices", "pixel_shuffle",
    "_low_memory_max_pool_with_offsets", "upsample_nearest2d", "upsample_bilinear2d",
) | _packets(prims, "_low_memory_max_pool_with_offsets") | _packets(
    torch.ops._c10d_functional, "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor",
    "all_to_all_single", "wait_tensor",
) | frozenset({operator.getitem})  # fmt: skip
"""Operators between a projection and its use: rotary embedding, scaling, masking, multiplied factors."""

ACTIVATIONS = _packets(
    aten, "sigmoid", "tanh", "erf", "erfc", "relu", "gelu", "silu", "glu", "leaky_relu", "elu", "hardtanh",
    "hardswish", "hardsigmoid", "softplus", "mish", "maximum", "minimum", "clamp_min", "relu6",
    "log_sigmoid_forward", "threshold", "prelu", "celu", "selu", "sin", "cos", "exp", "gt", "ge",
    "lt", "le",
)  # fmt: skip
"""Elementwise nonlinearities between the layers of a feed-forward network, whole or decomposed.

Norms contain none of them: they multiply by a factor computed from sums and roots.
"""

PICKS = _packets(aten, "index", "index_select")
"""Gathers that can select whole matrices from a stack."""

TOP_K = _packets(aten, "topk", "sort", "argmax", "kthvalue")

LOOKUPS = _packets(aten, "embedding", "_embedding_bag", "index", "index_select")
"""Operators that read rows of a table, if their first argument is a parameter."""

REDUCTIONS = _packets(
    aten, "mean", "sum", "amax", "amin", "max", "min", "var_mean", "var", "std", "logsumexp", "prod",
    "linalg_vector_norm", "norm", "any", "all", "adaptive_avg_pool1d", "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d",
)  # fmt: skip
"""Operators that reduce a dimension to one value."""

SCANS = (
    _packets(aten, "cumsum", "cumprod", "logcumsumexp", "_fft_r2c", "_fft_c2r", "_fft_c2c")
    | _packets(torch.ops.higher_order, "scan", "associative_scan", "while_loop")
)  # fmt: skip
"""Operators that carry a value from position to position."""

SOFTMAX = _packets(aten, "_softmax", "_safe_softmax", "softmax", "special_softmax")

EXPONENTIALS = SOFTMAX | _packets(aten, "exp", "exp2", "_log_softmax")
"""Operators that turn an absolute error of the input into a relative error of the output."""

MAXIMA = _packets(aten, "amax", "max") | _packets(prims, "prepare_softmax_online")
"""Operators that compute the maximum a decomposed softmax subtracts before its exponential."""

SUMS = _packets(aten, "add", "sub", "rsub")
"""Operators that join a branch to a residual stream."""

COLLECTIVES = _packets(
    torch.ops._c10d_functional, "all_gather_into_tensor", "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "all_reduce", "all_reduce_",
    "all_reduce_coalesced", "all_to_all_single", "broadcast",
)  # fmt: skip
"""Operators that exchange tensors between ranks; the first argument is the rank's contribution."""

RANDOM = _packets(aten, "rand", "randn", "rand_like", "randn_like", "bernoulli", "native_dropout")

REPEATS = _packets(aten, "repeat", "expand", "repeat_interleave")
"""Operators that copy a value several times."""

STREAM_SOURCES = _packets(aten, "embedding", "convolution", "_embedding_bag")
"""Operators that start a residual stream, beside floating-point inputs."""


def argument(node: fx.Node, index: int = 0) -> fx.Node:
    """Returns the positional argument of `node` at `index`, which must be a node."""
    value = node.args[index]
    assert isinstance(value, fx.Node), f"argument {index} of {node.name} is not a node"
    return value


def reached(start: Iterable[fx.Node], further: Callable[[fx.Node], Iterable[fx.Node]]) -> Iterator[fx.Node]:
    """Yields the nodes of `start`, and all nodes to which `further` leads from them, each once."""
    pending, seen = [*start], set()
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            yield node
            pending += further(node)


def ancestors(node: fx.Node, stops: Callable[[fx.Node], bool] = lambda _: False) -> set[fx.Node]:
    """Returns `node` and all nodes that it is computed from, up to those for which `stops` is true."""
    before = reached([node], lambda node: [arg for arg in node.all_input_nodes if not stops(arg)])
    return set() if stops(node) else set(before)


def permutation(node: fx.Node) -> list[int] | None:
    """Returns the source dimension of each dimension of `node` if it permutes dimensions, else None."""
    if (value := tensor(node)) is None:
        return None
    rank = value.ndim
    order = [*range(rank)]
    match packet(node):
        case aten.permute:
            return [dim % rank for dim in argument_of(node, "dims")]
        case aten.transpose:
            dim0, dim1 = (argument_of(node, name) % rank for name in ("dim0", "dim1"))
            order[dim0], order[dim1] = order[dim1], order[dim0]
            return order
        case aten.t:
            return order[::-1]
    return None


def packet(node: fx.Node) -> Any:
    """Returns the operator packet of a call node, as the operator sets hold it; None for other nodes."""
    if node.op != "call_function":
        return None
    return getattr(node.target, "_overloadpacket", node.target)


def called_packet(node: fx.Node) -> Any:
    """Returns the packet of the operator that `node` runs, itself or through a wrapper (see `call_of`)."""
    called, _ = call_of(node)
    return getattr(called, "_overloadpacket", called)
