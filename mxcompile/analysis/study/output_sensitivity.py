"""Estimates the effect of each GEMM's error on the model's output, by one backward from noise at the output.

Let v be independent standard normal numbers, g the gradient of v · output by a layer's result, and e a small
error of that result. Then E (g · e)² is the squared change of the output. Errors of rows are nearly
independent of one another, so Σ (g_row · e_row)² over the rows has nearly the same mean and a much smaller
variance (a stochastic trace estimator, Hutchinson 1989). The estimate is of first order in e, and covers each
GEMM alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from mxcompile.analysis.study.sites import ProductSite, Sites
from mxcompile.policy import Gemm


@dataclass(kw_only=True, slots=True)
class Sensitivity:
    """The estimates of a run with noise as the output's gradient.

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
