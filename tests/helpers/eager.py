"""The model a compiled one is held to: run eagerly, its chosen linears replaced by the reference casts.

Every product whose weight belongs to a layer that the report says is in MXFP8 is computed from operands that
`reference.round_trip` has quantized and dequantized, each along the contraction of its GEMM, in FP32; forward
and backward. Everything else is the model's own code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from helpers.casts import rounded_tensors
from helpers.reference import round_trip
from mxcompile.formats import Format
from mxcompile.report import GemmRecord, Report

Formats = dict[str, tuple[str, str, bool] | Format]
"""Of both operands of a GEMM: element type, rounding, whether its blocks are square; or any other format."""


class Recipe:
    """How one layer is computed: formats per GEMM, None for BF16."""

    def __init__(self, formats: dict[str, Formats | None]) -> None:
        self.formats = formats

    @classmethod
    def from_records(cls, records: list[GemmRecord]) -> Recipe:
        """What the report says of the layer."""
        return cls({r.gemm: _formats(r) if r.precision == "mxfp8" else None for r in records})

    def product(self, gemm: str, a: Any, b: Any, out: torch.dtype) -> torch.Tensor:
        """a · b, named tensors, quantized along the contraction if this GEMM is in MXFP8."""
        (a_name, a_value), (b_name, b_value) = a, b
        formats = self.formats.get(gemm)
        if formats is None:
            return (a_value.to(out) @ b_value.to(out)).to(out)
        left = _cast(a_value, -1, formats[a_name])
        right = _cast(b_value, -2, formats[b_name])
        return (left @ right).to(out)


def _formats(record: GemmRecord) -> Formats:
    return {f.operand: (f.elem, f.rounding, f.block == "32x32") for f in record.formats}


def uniform(fmt: tuple[str, str, bool] | Format) -> Recipe:
    """All operands of all GEMMs in one format."""
    gemms = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("x", "dy")}
    return Recipe({gemm: dict.fromkeys(operands, fmt) for gemm, operands in gemms.items()})


NVIDIA = uniform(("e4m3", "rceil", False))
"""The preset of that name."""

FP4 = {
    "mxfp4": uniform(Format.parse("e2m1 1x32 rceil")),
    "nvfp4": uniform(Format.parse("e2m1 1x16 two-level")),
}
"""The precisions of these names."""


def _cast(x: torch.Tensor, dim: int, fmt: tuple[str, str, bool] | Format) -> torch.Tensor:
    if isinstance(fmt, Format):
        return rounded_tensors(x, dim, fmt)
    elem, rounding, square = fmt
    if x.ndim == 2:
        return round_trip(x, dim, elem, rounding, square)
    return torch.stack([round_trip(part, dim, elem, rounding, square) for part in x])


class _Product(torch.autograd.Function):
    """x[m, k] · w[k, n] with the reference casts; bias is added by the caller."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, recipe: Recipe, out: torch.dtype) -> Any:
        ctx.save_for_backward(x, w)
        ctx.recipe = recipe
        return recipe.product("fprop", ("x", x), ("w", w), out)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        dx = ctx.recipe.product("dgrad", ("dy", dy), ("w", w.mT), dy.dtype)
        dw = ctx.recipe.product("wgrad", ("x", x.mT), ("dy", dy), dy.dtype)
        return dx.to(x.dtype), dw.to(w.dtype), None, None


def product(x: torch.Tensor, w: torch.Tensor, recipe: Recipe, out: torch.dtype) -> torch.Tensor:
    """x[m, k] · w[k, n] in `out`, forward and backward with the casts of `recipe`."""
    return _Product.apply(x, w, recipe, out)


class Replaced:
    """The linears of one model, found by the identity of their weights."""

    def __init__(self, model: nn.Module, report: Report) -> None:
        records: dict[str, list[GemmRecord]] = {}
        for record in report.gemms:
            if record.role not in ("attn_scores", "attn_values"):
                records.setdefault(record.name, []).append(record)
        self.recipes = {name: Recipe.from_records(group) for name, group in records.items()}
        self.names: dict[int, list[str]] = {}
        for path, parameter in model.named_parameters(remove_duplicate=False):
            owner, _, attribute = path.rpartition(".")
            short = attribute.removesuffix("weight").removesuffix("_")
            name = ".".join(part for part in (owner, short) if part)
            self.names.setdefault(parameter.untyped_storage().data_ptr(), []).append(name)
        self.used: set[str] = set()

    def recipe(self, weight: torch.Tensor) -> Recipe | None:
        """The recipe of the layer `weight` belongs to."""
        for name in self.names.get(weight.untyped_storage().data_ptr(), []):
            if name in self.recipes:
                self.used.add(name)
                return self.recipes[name]
        return None

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        """F.linear."""
        recipe = self.recipe(weight)
        if recipe is None:
            return _LINEAR(x, weight, bias)
        out = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        with torch.autocast("cpu", enabled=False):
            y = product(x.reshape(-1, x.shape[-1]), weight.t(), recipe, out)
            y = y.reshape(*x.shape[:-1], weight.shape[0])
            return y if bias is None else y + bias.to(out)

    def addmm(self, bias: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """torch.addmm, as GPT-2's Conv1D calls it."""
        recipe = self.recipe(weight)
        if recipe is None:
            return _ADDMM(bias, x, weight)
        return product(x, weight, recipe, x.dtype) + bias

    def grouped(self, x: torch.Tensor, weight: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        """F.grouped_mm, x[t, k] · w[e, k, n]. Blocks along t straddle groups, as in the graph."""
        recipe = self.recipe(weight)
        if recipe is None:
            return _GROUPED(x, weight, offs=offs)
        return grouped_product(x, weight, offs, recipe)


def grouped_product(x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """x[t, k] · w[e, k, n], rows of x by group, forward and backward with the casts of `recipe`."""
    return _Grouped.apply(x, w, offs, recipe)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, offs: Any, recipe: Recipe) -> Any:
        ctx.save_for_backward(x, w, offs)
        ctx.recipe = recipe
        return _grouped(recipe, "fprop", ("x", x), ("w", w), offs, x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, w, offs = ctx.saved_tensors
        dx = _grouped(ctx.recipe, "dgrad", ("dy", dy), ("w", w.mT), offs, dy.dtype)
        dw = _grouped(ctx.recipe, "wgrad", ("x", x.mT), ("dy", dy), offs, dy.dtype)
        return dx, dw, None, None


def _grouped(recipe: Recipe, gemm: str, a: Any, b: Any, offs: torch.Tensor, out: Any) -> Any:
    formats = recipe.formats.get(gemm)
    left, right = a[1].float(), b[1].float()
    if formats is not None:
        left, right = _cast(a[1], -1, formats[a[0]]), _cast(b[1], -2, formats[b[0]])
    ends = offs.tolist()
    spans = [slice(s, e) for s, e in zip([0, *ends[:-1]], ends, strict=True)]
    if right.ndim == 3:
        return torch.cat([left[span] @ right[i] for i, span in enumerate(spans)]).to(out)
    return torch.stack([left[:, span] @ right[span] for span in spans]).to(out)


_LINEAR = torch.nn.functional.linear
_ADDMM = torch.addmm
_GROUPED = torch.nn.functional.grouped_mm


@contextmanager
def reference_linears(model: nn.Module, report: Report) -> Iterator[Replaced]:
    """Run `model` eagerly in here and its MXFP8 linears use the reference casts."""
    replaced = Replaced(model, report)
    with (
        mock.patch.object(torch.nn.functional, "linear", replaced.linear),
        mock.patch.object(torch, "addmm", replaced.addmm),
        mock.patch.object(torch.nn.functional, "grouped_mm", replaced.grouped),
        mock.patch.object(torch.backends.mha, "get_fastpath_enabled", return_value=False),
    ):
        yield replaced
