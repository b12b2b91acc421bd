"""Finds the first operand of a step with NaN or Inf, and its origin.

    casts in the order of execution:   finite … finite  FIRST  later operands

Later operands inherit the values from the first. The values in x and dy arise between the last GEMM with
finite operands and the cast of the first operand; in a weight from an update or the loaded model; in a
result from its GEMM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mxcompile.passes.watch import RESULTS
from mxcompile.watch.recorder import Count


def finding(counts: Sequence[Count]) -> dict[str, Any]:
    """Returns the first nonzero entry of `counts`: layer, gemm, operand, count, origin, later operands."""
    index = next(position for position, (_, count) in enumerate(counts) if count)
    (layer, gemm, operand), count = counts[index]
    later = {key for key, more in counts[index + 1 :] if more and key[0] != layer}
    return {
        "layer": layer,
        "gemm": gemm,
        "operand": operand,
        "count": count,
        "origin": _origin(counts, index),
        "arrived": len(later),
    }


def _origin(counts: Sequence[Count], index: int) -> str:
    (layer, _, operand), _ = counts[index]
    if operand == "w":
        return "first in the weight: from an update, or from the loaded checkpoint"
    if operand in RESULTS.values():
        return "first in the product, whose operands are finite"
    before = [key for key, _ in counts[:index] if key[2] == operand and key[0] != layer]
    if not before:
        return "first in the model's input" if operand == "x" else "first in the loss or after the last layer"
    return f"first after {before[-1][0]} {before[-1][1]}, whose operands are finite"


def sentence(step: int, finding: dict[str, Any]) -> str:
    """Returns `finding` as a sentence."""
    return (
        f"step {step}: NaN or Inf in {finding['operand']} of {finding['layer']} {finding['gemm']}"
        f" ({finding['count']:,} scales or elements), {finding['origin']};"
        f" {finding['arrived']:,} later operands have NaN or Inf too"
    )
