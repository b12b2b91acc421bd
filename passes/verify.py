"""The verifier that runs after each pass: invariants of a graph of aten and mx operators."""

from __future__ import annotations

from torch import fx

from mxcompile import ops
from mxcompile.errors import VerificationError
from mxcompile.formats.encoding import scale_shape
from mxcompile.graph import sound
from mxcompile.graph.opsets import is_elementary, is_matmul_like, packet
from mxcompile.graph.tags import tags_of, tensor
from mxcompile.ops.view import Product


def verify(
    graph: fx.Graph,
    after: str,
    *,
    decided: bool,
    tagged: bool = True,
    checked: dict[fx.Node, object] | None = None,
) -> None:
    """Checks `graph` after the pass with the name `after`. Raises `VerificationError`.

    Every matmul-like node has a tag if `tagged`, with a choice if `decided`; operands of products have the
    dtypes of their formats and scales of matching shape; every cast has a fake value.

    checked: arguments with which products passed after earlier passes; products that pass are added.
    """
    checked = {} if checked is None else checked
    sound.check(graph, after)
    elementary: dict[int, bool] = {}  # by identity: operators compute their hash in Python
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if (is_simple := elementary.get(id(node.target))) is None:
            no_mx = packet(node) not in ops.PRODUCTS and packet(node) not in ops.CASTS
            is_simple = elementary[id(node.target)] = no_mx and is_elementary(node.target)
        if is_simple:
            continue
        operator = packet(node)
        is_product = operator in ops.PRODUCTS
        if tagged and (is_product or is_matmul_like(node)):
            if not (tags := tags_of(node)):
                raise VerificationError(f"after {after}: {node.format_node()} has no tag")
            if decided and any(tag.choice is None for tag in tags):
                raise VerificationError(f"after {after}: {node.format_node()} is not decided")
        if is_product and checked.get(node) is not node.args:
            _check_product(node, after)
            checked[node] = node.args
        if operator in ops.CASTS and node.meta.get("val") is None:
            raise VerificationError(f"after {after}: {node.format_node()} has no value")


def _check_product(node: fx.Node, after: str) -> None:
    product = Product.read(node)
    for side, dim in enumerate((-1, -2)):
        qdata, scale = product.sides[side]
        codes, bytes_ = tensor(qdata), tensor(scale)
        if codes is None or bytes_ is None:
            raise VerificationError(f"after {after}: {node.format_node()} reads no tensor")
        fmt = product.forms[side]
        expected = scale_shape(codes.shape, dim, fmt.tile)
        is_right = codes.dtype is fmt.elem.dtype and bytes_.dtype is fmt.scale.dtype
        if not is_right or len(expected) != bytes_.ndim:
            raise VerificationError(
                f"after {after}: {node.format_node()} reads {codes.dtype} and {bytes_.dtype}"
            )
        for wanted, size in zip(expected, bytes_.shape, strict=True):
            if isinstance(wanted, int) and isinstance(size, int) and wanted != size:
                raise VerificationError(
                    f"after {after}: {node.format_node()} reads scales {tuple(bytes_.shape)}"
                    f" for elements {tuple(codes.shape)} along {dim}"
                )
