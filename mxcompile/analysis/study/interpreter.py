"""Runs marked graphs node by node, with each GEMM quantized or not, and observes them.

An unquantized GEMM is computed from its operands before their casts, in the dtype of its result, as in the
model without mxcompile. The mx operators run their reference implementations. Observers run beside the
operators and do not change results; inside generated code they would change fusion, and with it result bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from mxcompile import ops
from mxcompile.analysis.study.sites import MARK, CastSite, ProductSite, Sites, observed
from mxcompile.analysis.study.stats import CastStats, ProductStats
from mxcompile.policy import Gemm


@dataclass(kw_only=True, slots=True)
class Sensitivity:
    """Estimates the effect of each GEMM's error on the output, by one backward from noise at the output.

    Let v be independent standard normal numbers, g the gradient of v · output by a layer's result, and e a
    small error of that result. Then E (g · e)² is the squared change of the output. Errors of rows are nearly
    independent of one another, so Σ (g_row · e_row)² over the rows has nearly the same mean and a much
    smaller variance (a stochastic trace estimator, Hutchinson 1989). The estimate is of first order in e, and
    covers each GEMM alone.

    squares: by layer, the estimated squared change of the main output caused by its forward GEMM. A layer is
    missing if none of its backward GEMMs is quantized, because its gradient is not observed then.
    """

    squares: dict[str, float] = field(default_factory=dict)
    _errors: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    _with_dgrad: set[str] = field(default_factory=set)

    def product(
        self,
        sites: Sites,
        site: ProductSite,
        plain: Tensor,
        sources: tuple[Tensor | None, Tensor | None],
        quantized: Callable[[], Tensor],
    ) -> None:
        """Processes one GEMM.

        plain: its result. sources: its operands before their casts. quantized: computes its quantized result.
        """
        tag = site.tag
        if tag.gemm == Gemm.FPROP:
            error = quantized().float() - plain.float()
            self._errors[tag.name].append(error if tag.tensors[0] == "x" else error.mT)
        elif self._errors[tag.name] and tag.gemm == self._dy_reader(sites, tag.name):
            error, side = self._errors[tag.name].pop(), tag.tensors.index("dy")
            gradient = sources[side]
            if gradient is not None:
                is_across = side == (1 if tag.gemm == Gemm.DGRAD else 0)  # there dy is read transposed
                gradient = gradient.mT if is_across else gradient
                by_row = (gradient.double() * error.double()).sum(-1)
                self.squares[tag.name] = self.squares.get(tag.name, 0.0) + float(by_row.square().sum())

    def _dy_reader(self, sites: Sites, layer: str) -> Gemm:
        """Returns the backward GEMM whose dy is used. dgrad and wgrad both read dy, which must count once."""
        if not self._with_dgrad:
            self._with_dgrad = {p.tag.name for p in sites.products if p.tag.gemm == Gemm.DGRAD}
        return Gemm.DGRAD if layer in self._with_dgrad else Gemm.WGRAD


Key = tuple[str, str]
"""Layer and GEMM."""


@dataclass(kw_only=True, slots=True)
class Run:
    """One run of the model.

    quantized: decides whether a GEMM is quantized. observe: whether to collect statistics. reach: collects
    the effect of each GEMM on the output in an unquantized run. on_product: called at every GEMM that could
    be quantized. products, casts: statistics, by site.
    """

    quantized: Callable[[Key], bool]
    observe: bool = False
    reach: Sensitivity | None = None
    on_product: Callable[[], object] = lambda: None
    products: dict[int, ProductStats] = field(default_factory=dict)
    casts: dict[int, CastStats] = field(default_factory=dict)

    def product(self, sites: Sites, args: tuple[Any, ...]) -> Tensor:
        """Returns the result of `observed(*args)`."""
        *operands, extra, out_dtype, _, lhs, rhs, index = args
        site = sites.products[index]
        self.on_product()
        if not self.quantized(site.key):
            plain = _plain(site, operands, extra, out_dtype, lhs, rhs)
            if self.reach is not None:
                self.reach.product(sites, site, plain, (lhs, rhs), lambda: _quantized(site, args))
            return plain
        out = _quantized(site, args)
        if self.observe:
            stats = self.products.setdefault(index, ProductStats())
            lhs, rhs = _sources(site, operands, lhs, rhs, torch.float32)
            with exact_fp32():
                (stats.add_grouped if site.grouped else stats.add)(out, lhs, rhs, extra)
        return out

    def cast(self, op: Any, index: int, site: CastSite, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """Returns the result of the cast ``op(*args)``; arbitrary values if no GEMM of this run reads it."""
        x: Tensor = args[0]
        if self.reach is None and not any(map(self.quantized, site.needed_by)):
            (shape, dtype), (scale_shape, scale_dtype) = ops.SPECS[op](*args)
            return x.new_zeros(shape, dtype=dtype), x.new_zeros(scale_shape, dtype=scale_dtype)
        qdata, scale = op(*args)
        if self.observe:
            stats = self.casts.setdefault(index, CastStats())
            stats.add(x, qdata, scale, site.block_dim, site.fmt)
        return qdata, scale


class Interpreter(fx.Interpreter):
    """Runs a marked graph. current: returns the `Run` of each call."""

    def __init__(self, gm: fx.GraphModule, sites: Sites, current: Callable[[], Run]) -> None:
        super().__init__(gm)
        self._sites = sites
        self._current = current

    def run_node(self, n: fx.Node) -> Any:
        """Returns the value of `n`."""
        if n.target is observed:
            args, _ = self.fetch_args_kwargs_from_env(n)
            return self._current().product(self._sites, args)
        if n.target is ops.cast and MARK in n.meta:
            args, _ = self.fetch_args_kwargs_from_env(n)
            index = n.meta[MARK]
            return self._current().cast(n.target, index, self._sites.casts[index], args)
        return super().run_node(n)


def _quantized(site: ProductSite, args: tuple[Any, ...]) -> Tensor:
    """Returns the result of the GEMM as rewritten by the passes."""
    *operands, extra, out_dtype, tensors, _, _, _ = args
    out: Tensor = site.op(*operands, extra, out_dtype, *site.words, tensors)
    return out


def _sources(
    site: ProductSite, operands: list[Any], lhs: Any, rhs: Any, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns both operands before their casts; operands that the model stores quantized are dequantized."""
    a, scale_a, b, scale_b = operands
    if lhs is None:
        lhs = site.decoded(a, scale_a, 0, dtype)
    if rhs is None:
        rhs = site.decoded(b, scale_b, 1, dtype)
    return lhs, rhs


def _plain(
    site: ProductSite, operands: list[Any], extra: Any, dtype: torch.dtype, lhs: Any, rhs: Any
) -> Tensor:
    """Returns the result of the GEMM as in the model."""
    a, b = (source.to(dtype) for source in _sources(site, operands, lhs, rhs, dtype))
    if site.grouped:
        result: Tensor = torch.ops.aten._grouped_mm.default(a, b, extra)
        return result
    if extra is None:
        return a @ b
    return torch.addmm(extra, a, b) if a.ndim == 2 else torch.baddbmm(extra, a, b)


@contextmanager
def exact_fp32() -> Iterator[None]:
    """Disables TF32 and other reduced precision for FP32 products."""
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision
