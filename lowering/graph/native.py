"""native: choose the mx GEMMs that the target's MX GEMM runs, and leave them in place.

`choices.defaults` lowers these products (matrices, batches, groups) to a Triton template whose dot is the
chip's block-scaled MMA, or to the vendor's GEMM. The tag names the template until Inductor has chosen
(`inductor.winners`). `expand` emulates the others, with a reason: empty products, products with one result
element, and products whose number of groups is unknown. If the user names another chip as the target, Triton
may emulate the MMA on this machine's GPU; if that emulation loses scales, `expand` emulates all products.

Source of the lost scales: triton issue 11735.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import fx

from mxcompile.graph.tags import hint, is_empty, set_tag, tags_of, tensor, value_of
from mxcompile.lowering import optional
from mxcompile.lowering.chips.tiles import MatmulConfig, TiledConfig
from mxcompile.lowering.choices import configs, defaults
from mxcompile.lowering.choices.epilogue import has_epilogue, is_native
from mxcompile.lowering.graph.lowering_pass import EMPTY, NativePass, Reasons
from mxcompile.lowering.targets import of_device
from mxcompile.ops.view import Product

_EMULATES_RIGHT = (3, 9)
"""The first Triton whose emulation of the MMA reads scale byte 0 as 2^−127; older versions read 0."""

_OUTPUTS = frozenset({torch.bfloat16, torch.float16, torch.float32})


class Native(NativePass):
    """Chooses the products that the chip's MX GEMM runs."""

    def candidates(self, graph: fx.Graph) -> Iterator[fx.Node]:
        """Returns the products that the target's MX GEMM runs."""
        return (product.node for product, reason in self._products(graph) if not reason)

    def apply(self, graph: fx.Graph) -> Reasons:
        """Names the kernel in the tags of the candidates. Returns the reasons of the other products."""
        reasons = {}
        for product, reason in self._products(graph):
            if reason:
                reasons[product.node] = reason
                continue
            kernel = f"{self._config(product)} ({self.target.mma})"
            set_tag(product.node, *(replace(tag, kernel=kernel) for tag in tags_of(product.node)))
        return reasons

    def _products(self, graph: fx.Graph) -> Iterator[tuple[Product, str]]:
        """Yields each mx GEMM with the reason why the target does not run it, or ""."""
        products = (Product.read(node) for node in graph.nodes if is_native(node))
        return ((product, unmet(product, self.device)) for product in products)

    def _config(self, product: Product) -> str:
        """Returns the template and its tile, or the number of choices under autotuning."""
        name, tiled = _name(product), self._tiled(product)
        tiles = configs.products(self.target, _rows(product))
        if configs.autotuning():
            others = 0 if tiled and product.is_grouped else len(tiles)
            return f"{name} autotuned of {len(tiled) + others}"
        if tiled:
            form = defaults.default(self._size(product), self.target, defaults.forms(tiled)).form
            (chosen,) = defaults.tile_of(form, tiled)
            return f"{name}_tiled {_shape(chosen, product)}"
        ((swap, tile),) = tiles
        return f"{name} {_shape(tile, product)}{' swapped' if swap else ''}"

    def _size(self, product: Product) -> defaults.MXProduct:
        """Returns the sizes and formats of `product` by which `defaults` chooses a form."""
        out, a = value_of(product.node), value_of(product.a)
        *groups, m, n = map(hint, out.shape)
        kind = defaults.DENSE
        if product.is_grouped:
            kind = defaults.ALONG_K if groups else defaults.ROWS
        return defaults.MXProduct(
            kind=kind,
            precision=defaults.precision_of(product.forms[0]),
            m=m,
            n=n,
            k=product.per_byte * hint(a.shape[-1]),
            groups=groups[0] if groups else 1,
            epilogue=has_epilogue(product.node),
        )

    def _tiled(self, product: Product) -> list[TiledConfig]:
        """Returns the tiles of the tiled form for `product`; [] if the form cannot run it."""
        if product.is_grouped:
            return self._tiled_groups(product)
        lhs, rhs = product.sides
        out, a, scale_a, b, scale_b = map(value_of, (product.node, *lhs, *rhs))
        if out.ndim != 2 or any(scale.ndim != 1 for scale in (scale_a, scale_b)):
            return []
        if configs.contiguous(a.stride()) is None or configs.contiguous(b.stride()) is None:
            return []
        return configs.tiled_products(self.target, *map(hint, (*out.shape, a.shape[1])))

    def _tiled_groups(self, product: Product) -> list[TiledConfig]:
        """Returns the tiles for groups of K, of rows, or of columns (rows of the transposed product)."""
        out, a, b = map(value_of, (product.node, product.a, product.b))
        if (a.ndim, b.ndim) == (3, 3):
            return []
        if a.ndim == b.ndim:
            groups, *sizes = map(hint, (*out.shape, a.shape[1]))
            m, n, k = sizes
            return configs.tiled_groups_of_k(self.target, (m, n, k), groups, a.stride(), b.stride())
        m, n = out.shape
        if a.ndim == 3:
            a, b, m, n = b.t(), a.mT, n, m
        tiles = configs.tiled_groups(self.target, _rows(product), *map(hint, (m, n, a.shape[1])))
        return [tile for tile in tiles if configs.grouped_fits(a.stride(), b.shape, b.stride(), tile)]


def unmet(product: Product, device: str) -> str:
    """Returns the reason why an MX GEMM does not run `product`, or "". device: type of its tensors."""
    out, a, offs = map(tensor, (product.node, product.a, product.offs))
    if out is None or a is None:
        return "the shape of an operand or of the result is unknown"
    if a.device.type != device:
        return f"its operands are on {a.device.type}, not on {device}"
    if lost := _loses_scales(a.device):
        return lost
    if out.dtype not in _OUTPUTS:
        return f"its result is {str(out.dtype).removeprefix('torch.')}, not BF16, FP16 or FP32"
    if a.ndim not in (2, 3):
        return f"its operand has {a.ndim} dimensions, not 2 or 3"
    if offs is not None and not isinstance(offs.shape[0], int):
        return "the number of groups is not a constant"
    if configs.single(out.shape):
        return "its result is one element"
    return EMPTY if is_empty((*out.shape, a.shape[-1])) else ""


def _loses_scales(device: torch.device) -> str:
    """Returns the reason why the MMA, emulated on the GPU `device`, gives wrong results, or ""."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return ""
    gpu, release = of_device(device), optional.triton_release()
    if gpu.native or release >= _EMULATES_RIGHT:
        return ""
    version = ".".join(map(str, release))
    return f"Triton {version} would read scale bytes of 0 as 0 on {gpu.name}, which has no MX instruction"


def _shape(tile: MatmulConfig, product: Product) -> str:
    return f"{tile.block_m}x{tile.block_n}x{tile.block_k * product.per_byte}"


def _name(product: Product) -> str:
    out, a = value_of(product.node), value_of(product.a)
    if product.is_grouped:
        return "mx_scaled_grouped_mm_k" if out.ndim > a.ndim else "mx_scaled_grouped_mm"
    return "mx_scaled_bmm" if a.ndim == 3 else "mx_scaled_mm"


def _rows(product: Product) -> int:
    """Returns the rows of each GEMM of `product`; for groups of rows or columns their average."""
    out, a, b = map(value_of, (product.node, product.a, product.b))
    if not product.is_grouped or a.ndim == b.ndim:
        return hint(out.shape[-2])
    ragged, groups = (out.shape[0], b.shape[0]) if a.ndim == 2 else (out.shape[1], a.shape[0])
    return -(-hint(ragged) // hint(groups))
