"""Kernels of casts: the tile of a program, and cheaper operators in the prologue that Inductor generates.

    a row's statistic, a column's weight      loaded once a row or column, and broadcast
    1 / (1 + exp(−x)) before BF16             the chip's approximations (`lowering.kernels.packed.sigmoid`)
    the larger or smaller of two values       a comparison, on NVIDIA's chips (see `lowering.kernels.tiles`)

Inductor indexes all loads of a prologue with the whole tile. Triton then loads a row's statistic along the
rows, in another layout, and converts it to the tile's layout through shared memory. In FP8 casts, whose rows
are permuted, a column's weight keeps the index of the whole tile: a load by columns would be converted there.
All three rewrite the generated text. If the first or second does not match, the code is correct but slower.
"""

from __future__ import annotations

import re
from typing import Any

from torch._inductor import ir
from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate, TritonTemplateKernel

from mxcompile.lowering.choices import configs
from mxcompile.lowering.targets import of_device

TILE_INDICES = r"""
    M = {{size("X", 0)}}
    N = {{size("X", 1)}}
    pid_m = tl.program_id(0)
    pid_n = tl.program_id(1)
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
"""
"""Source: the rows `rm` and columns `rn` of a tile of X [M, N]."""


@SymbolicGridFn
def grid(m: Any, n: Any, meta: dict[str, Any], *, cdiv: Any) -> tuple[Any, Any, int]:
    """Returns the grid: one program per tile."""
    return cdiv(m, meta["BLOCK_M"]), cdiv(n, meta["BLOCK_N"]), 1


_LOAD = re.compile(r"tl\.load\((\w+) \+ \(tl\.broadcast_to\(([^\[\]]*), \[BLOCK_M, BLOCK_N\]\)\), mask\b")
_SIGMOID = re.compile(
    r"(?P<negative>\w+) = -(?P<x>\w+)\n"
    r"\s*(?P<power>\w+) = libdevice\.exp\((?P=negative)\)\n"
    r"\s*(?P<one>\w+) = tl\.full\(\[1\], 1\.0, tl\.float32\)\n"
    r"\s*(?P<sum>\w+) = (?P=power) \+ (?P=one)\n"
    r"(?:\s*(?P<silu>\w+) = \((?P=x) / (?P=sum)\)\n"
    r"|\s*(?P<number>\w+) = tl\.full\(\[1\], 1, tl\.int32\)\n"
    r"\s*(?P<inverse>\w+) = \((?P=number) / (?P=sum)\)\n"
    r"\s*(?P<sigmoid>\w+) = (?P=inverse) \* (?P=one)\n)"
)
_CAST = re.compile(r"packed\.(?:quantize|round)_")
_ROUNDED = re.compile(r"\b([xy]) = (.+)\.to\(tl\.bfloat16\)\.broadcast_to\(xindex\.shape\)")
_ROUNDED_BEFORE = re.compile(
    r"(\w+) = (\w+)\.to\(tl\.bfloat16\)\n(\s*)([xy]) = \1\.broadcast_to\(xindex\.shape\)\n"
)
_EXTREME = re.compile(
    r"\btl\.(max|min)imum\(([^()]*), tl\.PropagateNan\.ALL\)|\btriton_helpers\.(max|min)imum\(([^()]*)\)"
)


class Producing(TritonTemplateKernel):
    """A kernel of a cast with cheaper operators in its prologue."""

    def render(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the rendered template. Its text is rewritten once the last hole in it is filled."""
        rendered = super().render(*args, **kwargs)  # type: ignore[no-untyped-call]
        whole = rendered.finalize_remaining
        rendered.finalize_remaining = lambda: self.rewritten(whole())
        return rendered

    def rewritten(self, source: str) -> str:
        """Returns the text of the kernel for `source`, the text that Inductor generated."""
        on_nvidia = isinstance(of_device(self.output_node.get_device_or_error()).arch, int)
        source = narrowed(compared(source) if on_nvidia else source)
        return approximated(source) if "    PACKED : tl.constexpr = True" in source else source


class ProducingTemplate(TritonTemplate):
    """A template of casts with cheaper operators in their prologues."""

    kernel_type = Producing


def compared(source: str) -> str:
    """Returns `source` with `tiles.larger` and `tiles.smaller` for the operators of Triton and Inductor."""

    def replacement(extreme: re.Match[str]) -> str:
        name, operands = extreme[1] or extreme[3], extreme[2] or extreme[4]
        return f"tiles.{'larger' if name == 'max' else 'smaller'}({operands})"

    return _EXTREME.sub(replacement, source)


def narrowed(source: str) -> str:
    """Returns `source` with loads [BLOCK_M, 1] and [1, BLOCK_N] for loads of whole tiles that repeat a value.

    Loads by columns are narrowed only in a template that has their mask.
    """

    def replacement(load: re.Match[str]) -> str:
        pointer, index = load.groups()
        by_row, by_column = "idx_m" in index, "idx_n" in index
        mask = "mask_m" if by_row else "mask_n"
        if by_row == by_column or "xindex" in index or f"    {mask} = " not in source:
            return load[0]
        return f"tl.load({pointer} + ({index}), {mask}"

    return _LOAD.sub(replacement, source)


def approximated(source: str) -> str:
    """Returns `source` with `packed.sigmoid` for sigmoids before its cast, alone or in x · sigmoid(x).

    Values before the cast are also rounded to BF16 in pairs. Code after the cast may store FP32 values, and
    does not change.
    """

    def replacement(match: re.Match[str]) -> str:
        *lines, last = match[0].rstrip("\n").split("\n")
        indent = last[: len(last) - len(last.lstrip())]
        factor = f"{match['x']} * " if match["silu"] else ""
        product = f"{indent}{match['silu'] or match['sigmoid']} = {factor}packed.sigmoid({match['x']})"
        return "\n".join([*lines, product]) + "\n"

    cast = _CAST.search(source)
    end = cast.start() if cast else len(source)
    before, behind = source[:end], source[end:]
    before = _SIGMOID.sub(replacement, before).replace("tl.sigmoid(", "packed.sigmoid(")
    before = _ROUNDED_BEFORE.sub(
        r"\1 = \2.to(tl.bfloat16)\n\3\4 = \2.to(tl.bfloat16).broadcast_to(xindex.shape)\n", before
    )
    return _ROUNDED.sub(r"\1 = packed.rounded((\2).broadcast_to(xindex.shape))", before) + behind


_FEW_READS = 4


def leaves_room(source: Any) -> bool:
    """Whether the producer of `source`, if there is one, leaves enough registers for a packed cast.

    A producer that calls a library function takes registers for the call. A producer with a head dimension
    that reads many tensors takes registers for their addresses.
    """
    columns = source.get_size()[-1]
    while source is not None and not isinstance(source, ir.Pointwise):
        source = getattr(source, "data", None)
    if source is None:
        return True
    by_heads = source.get_size()[-1] != columns
    light = configs.light(source.inner_fn_opcount().used_ops)
    return light and not (by_heads and len(source.get_reads()) > _FEW_READS)
