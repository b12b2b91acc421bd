"""The kernels of operators that have several, in the order in which the lowering tries them.

A kernel is the function ``lower_<operator>`` of a module. If it returns None, it does not take the operands,
and the next kernel is tried. Templates take part once a pass has imported them (see `optional`).
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from torch._inductor.lowering import fallback_handler, register_lowering

from mxcompile import ops

ORDER = {
    "attention": ("templates.cached_attention", "cpu.attention"),
    "cast": ("templates.casts", "templates.fp8_casts", "templates.fp4_casts"),
    "cast_statistics": ("templates.statistics", "cpu.statistics"),
    "largest": ("templates.fp4_casts", "inductor.scales"),
    "matmul": ("templates.scaled_mm", "cpu.integer_mm"),
    "weight_only_mm": ("templates.weight_only", "cpu.weight_only", "inductor.decode"),
}
"""Modules with kernels of each operator. Without a kernel, a cast is a loop; other operators run eagerly."""


def first(operator: str, *arguments: Any, **named: Any) -> Any:
    """Returns the result of the first kernel of `operator` that takes the arguments, or None."""
    for name in ORDER[operator]:
        module = sys.modules.get(f"mxcompile.lowering.{name}")
        if module is not None:
            result = getattr(module, f"lower_{operator}")(*arguments, **named)
            if result is not None:
                return result
    return None


def register() -> None:
    """Imports the kernels that need no Triton, and registers their operators with Inductor."""
    for name in dict.fromkeys(name for names in ORDER.values() for name in names):
        if not name.startswith("templates."):
            importlib.import_module(f"mxcompile.lowering.{name}")
    for operator in ORDER.keys() - {"cast", "cast_statistics"}:  # their own lowerings call `first`
        _register(operator)


def _register(operator: str) -> None:
    # not in Inductor's set of fallbacks: it takes the results of those operators as stored in memory
    call = fallback_handler(getattr(ops, operator), add_to_fallback_set=False)

    @register_lowering(getattr(ops, operator), type_promotion_kind=None)
    def lower(*arguments: Any, **named: Any) -> Any:
        result = first(operator, *arguments, **named)
        return call(*arguments, **named) if result is None else result
