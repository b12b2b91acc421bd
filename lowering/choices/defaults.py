"""Chooses the kernel of a product without timing: by the first row of a table that matches, with a reason.

    kind of product, its elements, a condition  →  form

The table skips forms that cannot run a product: the vendor's form and the persistent form need aligned
operands, the pointer form runs all. If Inductor times kernels (``mode="max-autotune"``), all forms compete
without the table. No row was timed on its chip: rows rest on published measurements and on
`mxcompile.offline.estimate`, until measurements replace them.

Sources: cuBLAS and Triton's block-scaled products of 8192³ on a B200, triton-lang/triton #9044 and #9697;
experts on a B200, the README of torchao's ``prototype/moe_training``; NVFP4 on an RTX 5090, vllm-project/vllm
#38338, gn-kernels and gpu-flops-bench (`mxcompile.offline.rates`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from mxcompile.formats import Format
from mxcompile.lowering.chips.tiles import TiledConfig
from mxcompile.lowering.targets import Target

VENDOR, SPECIALIZED, PERSISTENT, POINTERS = "vendor", "specialized", "persistent", "pointers"
"""Forms: the library's kernel; our TMA kernel, warp-specialized or persistent; our kernel with pointers."""

ALL = frozenset({VENDOR, SPECIALIZED, PERSISTENT, POINTERS})

MXFP8, MXFP4, NVFP4 = "mxfp8", "mxfp4", "nvfp4"
"""Formats of the operands, by their names in policies."""

FP4 = frozenset({MXFP4, NVFP4})
EVERY = FP4 | {MXFP8}

DENSE, BATCHED, ROWS, ALONG_K = "dense", "batched", "groups of rows", "groups of K"
"""Kinds of products."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MXProduct:
    """A product of MX operands.

    precision: format of its operands. m, n, k: sizes of a matrix, or of all groups together. groups:
    number of results. epilogue: whether the kernel has a fused epilogue (see `epilogue`).
    """

    kind: str
    precision: str = MXFP8
    m: int
    n: int
    k: int
    groups: int = 1
    epilogue: bool = False

    def is_large(self, target: Target) -> bool:
        """Whether every processor gets at least two tiles of the persistent form."""
        along_k = self.groups if self.kind == ALONG_K else 1
        return along_k * self.m * self.n >= 2 * target.processors * _TILE


_TILE = 128 * 128

_LONG_K = 4096
"""From this K on, a library's product and a second kernel are faster than our product with an epilogue.

For each k, our tile of 128×128 takes 4.1 cycles of shared memory, but 2.0 cycles of the matrix units, so it
reaches at most 0.48 of the data sheet's rate. The library reaches 0.60, and then writes and reads 4 bytes an
element of the result, at 0.78 of the memory's rate.
"""


def precision_of(form: Format) -> str:
    """Returns the precision of a product of operands in `form`."""
    if not form.packed:
        return MXFP8
    return NVFP4 if form.two_level else MXFP4


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRow:
    """The default form of products of `kind` in `precisions` if `holds` is true. when: `holds` in words."""

    kind: str
    when: str
    precisions: frozenset[str] = EVERY
    holds: Callable[[MXProduct, Target], bool] = lambda product, target: True
    form: str
    reason: str


def _large_alone(product: MXProduct, target: Target) -> bool:
    return product.is_large(target) and not product.epilogue


TABLE = (
    TableRow(
        kind=DENSE,
        precisions=frozenset({NVFP4}),
        when="large, nothing fused behind it",
        holds=_large_alone,
        form=VENDOR,
        reason="cuBLAS reaches 5,590 TFLOPS at 8192³ on a B200 and Gluon's example on one processor 4,782; on"
        " an RTX 5090 CUTLASS reaches over 1,000 and Triton 874 (published); ours has not been timed",
    ),
    TableRow(
        kind=DENSE,
        precisions=frozenset({NVFP4}),
        when="large, with an epilogue, K of 7,168 or more, on `sm_120` of 4,096",
        holds=lambda product, target: product.is_large(target) and product.k >= target.long_k,
        form=VENDOR,
        reason="on a B200 ours reaches 0.44 of the data sheet's rate (machine code) and cuBLAS 0.57"
        " (published), on an RTX 5090 0.52 and 0.80 (published): from here on that saves more than another"
        " kernel behind it costs, 4 to 6 bytes an element",
    ),
    TableRow(
        kind=DENSE,
        precisions=frozenset({MXFP8}),
        when="large, nothing fused behind it",
        holds=_large_alone,
        form=VENDOR,
        reason="cuBLAS reaches 2,850 TFLOPS at 8192³ on a B200 and Triton's own example 2,202 (published);"
        " ours has not been timed",
    ),
    TableRow(
        kind=DENSE,
        precisions=frozenset({MXFP8}),
        when="large, with an epilogue, K of 4,096 or more",
        holds=lambda product, target: product.is_large(target) and product.k >= _LONG_K,
        form=VENDOR,
        reason="a tile of 128×128 needs twice the time of its products from shared memory, so that ours"
        " reaches 0.48 of the data sheet's rate (machine code) and cuBLAS 0.60 (published): from here on that"
        " saves more than writing and reading the result costs, 4 bytes an element",
    ),
    TableRow(
        kind=DENSE,
        when="large: with an epilogue and a smaller K, MXFP4, or not for the library",
        holds=MXProduct.is_large,
        form=SPECIALIZED,
        reason="an epilogue in the kernel saves writing and reading the result; extra warps and a second"
        " accumulator hide it behind the next tile, where it would leave the matrix units idle a"
        " quarter of the time (machine code)",
    ),
    TableRow(
        kind=DENSE,
        when="small",
        form=PERSISTENT,
        reason="one tile a processor: no other tile overlaps with it, bytes and latency bound it, and"
        " a library's launch costs the host more",
    ),
    TableRow(
        kind=DENSE,
        when="odd, or few rows",
        form=POINTERS,
        reason="reads any strides and starts; few rows go on the side of the MMA that may be narrow",
    ),
    TableRow(
        kind=BATCHED,
        when="all",
        form=POINTERS,
        reason="no library has a batch of MX products; one launch for all entries",
    ),
    TableRow(
        kind=ROWS,
        precisions=frozenset({MXFP8}),
        when="large, nothing fused behind it, on `sm_100`",
        holds=lambda product, target: _large_alone(product, target) and target.groups_in_library,
        form=VENDOR,
        reason="torchao trains experts by it, 1.4 to 1.8 times as fast as BF16 on a B200 for Llama 4's sizes"
        " (published); ours has not been timed. Its machine code seems to be for that chip alone",
    ),
    TableRow(
        kind=ROWS,
        when="else",
        form=PERSISTENT,
        reason="takes operands of any majorness, E5M2, and an epilogue",
    ),
    TableRow(
        kind=ROWS,
        when="odd, or few rows a group",
        form=POINTERS,
        reason="reads any strides and starts",
    ),
    TableRow(
        kind=ALONG_K,
        when="aligned",
        form=PERSISTENT,
        reason="the library's kernel needs groups of whole blocks, and group sizes are in the data",
    ),
    TableRow(
        kind=ALONG_K,
        when="odd, or few rows of the result",
        form=POINTERS,
        reason="reads any strides and starts, and masks elements of other groups",
    ),
)
"""Rows by priority. Chips without tensor memory run only the pointer form and, for NVFP4, the library's."""


def forms(tiles: Sequence[TiledConfig]) -> set[str]:
    """Returns the forms of mxcompile that can run with `tiles`, the pointer form among them."""
    specialized = {SPECIALIZED for tile in tiles if tile.warp_specialize}
    return {POINTERS, *specialized, *([PERSISTENT] if tiles else [])}


def tile_of(form: str, tiles: Sequence[TiledConfig]) -> list[TiledConfig]:
    """Returns the first of `tiles` for `form`, else the first tile; [] for forms without the accelerator."""
    if form not in (SPECIALIZED, PERSISTENT):
        return []
    fitting = [tile for tile in tiles if tile.warp_specialize == (form == SPECIALIZED)]
    return [*fitting, *tiles][:1]


def default(product: MXProduct, target: Target, runs: Collection[str]) -> TableRow:
    """Returns the row that decides `product` on `target`. runs: forms that can compute it."""
    return next(
        row
        for row in TABLE
        if row.kind == product.kind
        and product.precision in row.precisions
        and row.form in runs
        and row.holds(product, target)
    )
