"""`tune`: which GEMMs have to stay in BF16 for a bound to hold, found by measuring.

    SQNR     every layer with a GEMM below the bound is run alone in MXFP8; GEMMs that fail there too are out
    loss     every layer is run alone quantized, forward only; by how far each moves the loss for its FLOPs,
             layers go out until the loss of all the rest is within the bound, then come back, the most
             expensive first, where the bound allows it

The loss of one step depends on forward GEMMs only, so a bound on it exempts only these. What was found is
audited once more as the policy that is handed out. Interactions are measured, not assumed: a set of layers is
only accepted for what it gives together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from tqdm import tqdm

from mxcompile.analysis.audit import Run, Session, audit, loss_gap
from mxcompile.analysis.audit.interpreter import Key
from mxcompile.analysis.audit.session import LossFunction
from mxcompile.analysis.tune.bounds import Bounds
from mxcompile.analysis.tune.measure import lowest_sqnr, quantizes
from mxcompile.analysis.tune.mix import Call, mix
from mxcompile.analysis.tune.tuned import Exempt, Tuned, exempting
from mxcompile.errors import OptionError
from mxcompile.lowering.targets import AUTO, check
from mxcompile.models.arguments import ModelInput, keywords
from mxcompile.policy import Gemm, Policy


def tune(
    model: nn.Module,
    *args: Any,
    min_sqnr: float | None = None,
    max_loss_gap: float | None = None,
    policy: Policy | str | dict[str, Any] | None = None,
    among: Sequence[str] = (),
    target: str = AUTO,
    loss_fn: LossFunction | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **inputs: ModelInput,
) -> Tuned:
    """The policy that keeps most of `model` quantized with its error on a call in bounds.

    args, inputs, kwargs: of the call (see `models.arguments`). min_sqnr: least SQNR in dB of the outputs of
    all quantized GEMMs against FP32. max_loss_gap: largest share by which the loss may differ from BF16's.
    policy: what to start from, as the backend's option; only layers that it quantizes are considered. among:
    precisions and presets to mix, of which every layer gets the cheapest on `target` that meets the bounds
    (see `mix`); without them layers are quantized as `policy` has it, or not. loss_fn: as for `audit`. The
    model is left as it is.

    Returns a `Tuned`, whose ``met`` says whether a policy within the bounds was found. Raises `OptionError`
    for bounds that are none, unknown words and a target without a mix, `TargetError` for an unknown one,
    `ModelError` if the model cannot be captured or has no loss to bound.
    """
    bounds = Bounds(min_sqnr=min_sqnr, max_loss_gap=max_loss_gap)
    given = {
        "min_sqnr": min_sqnr,
        "max_loss_gap": max_loss_gap,
        "policy": policy,
        "among": among,
        "target": target,
        "loss_fn": loss_fn,
    }
    named = keywords("tune", model, inputs, kwargs, given)
    if isinstance(among, str):
        raise OptionError(f"among is a list of precisions and presets, found {among!r}: write [{among!r}]")
    if among:
        call = Call(model=model, args=args, kwargs=named, loss_fn=loss_fn)
        return mix(call, Policy.resolve(policy), among, bounds, check(target))
    if target != AUTO:
        raise OptionError("target is for the costs of a mix: name what to mix with among")
    session = Session(model, args, named, policy=policy, loss_fn=loss_fn)
    with tqdm(desc="tune: tracing", unit="run", disable=None, leave=False) as bar:

        def trying(what: str, left: int) -> None:
            bar.total = bar.n + left
            bar.set_description(f"tune: {what}")

        search = _Search(session, bounds, trying, bar.update)
        search.run()
        trying("audit of the policy", 1)
    start = session.options.policy
    tuned = exempting(start, session.report(), search.exempt)
    final = audit(model, *args, policy=tuned, loss_fn=loss_fn, kwargs=named)
    return Tuned(
        policy=tuned,
        bounds=bounds,
        exempt=search.exempt,
        comments=tuple(f"{e.reason} ({e.flop_share:.2%} of matmul FLOPs)" for e in search.exempt),
        audit=final,
        flop_share_before=session.report().summary.flop_share,
        met=bounds.allow(final.numerics) and quantizes(final.report, bounds),
    )


class _Search:
    """State of one search: what is out so far, and why."""

    def __init__(
        self,
        session: Session,
        bounds: Bounds,
        trying: Callable[[str, int], object],
        on_run: Callable[[], object],
    ) -> None:
        self._session = session
        self._bounds = bounds
        self._trying = trying
        self._on_run = on_run
        self._reference: float | None = None
        self._out: set[Key] = set()
        self._reasons: dict[str, list[str]] = {}

    def run(self) -> None:
        """Find what has to be in BF16."""
        self._trying("unquantized", 1)
        self._reference = self._session.run(Run(quantized=lambda _: False)).loss
        self._on_run()
        self._bounds.check_loss(self._reference)
        if self._bounds.min_sqnr is not None:
            self._meet_sqnr()
        if self._bounds.max_loss_gap is not None:
            self._meet_loss()

    @property
    def exempt(self) -> tuple[Exempt, ...]:
        """What was found, in the order of the model."""
        total = sum(gemm.flops for gemm in self._session.report().gemms) or 1
        flops = self._flops()
        found = []
        for layer in dict.fromkeys(name for name, _ in self._keys()):
            gemms = tuple(str(g) for g in Gemm if (layer, str(g)) in self._out)
            if gemms:
                share = sum(flops[layer, gemm] for gemm in gemms) / total
                reason = "; ".join(self._reasons[layer])
                found.append(Exempt(name=layer, gemms=gemms, reason=reason, flop_share=share))
        return tuple(found)

    def _meet_sqnr(self) -> None:
        self._trying("everything quantized", 1)
        failing = self._failing(self._sqnr(lambda key: True))
        layers = [*dict.fromkeys(name for name, _ in failing)]
        for number, layer in enumerate(layers):
            self._trying(f"{layer} alone", len(layers) - number)
            alone = self._sqnr(lambda key, layer=layer: key[0] == layer)  # type: ignore[misc]
            self._exempt_for_sqnr({key: alone[key] for key in self._failing(alone) if key in failing})
        while failing:
            self._trying("what is left, together", 1)
            together = self._sqnr(lambda key: key not in self._out)
            failing = self._failing(together)
            # what follows a NaN is NaN: only the first of them is known to be the cause
            finite = [key for key in failing if not math.isnan(together[key])]
            self._exempt_for_sqnr({key: together[key] for key in finite or failing[:1]})

    def _sqnr(self, quantized: Callable[[Key], bool]) -> dict[Key, float]:
        """SQNR of the GEMMs in MXFP8, the worst of those of one name, in the order they ran."""
        found = lowest_sqnr(self._session, quantized)
        self._on_run()
        return found

    def _failing(self, sqnr: dict[Key, float]) -> list[Key]:
        return [key for key, value in sqnr.items() if not self._bounds.allows_sqnr(value)]

    def _exempt_for_sqnr(self, measured: dict[Key, float]) -> None:
        for (layer, gemm), value in measured.items():
            found = "NaN" if math.isnan(value) else f"{value:.2f} dB"
            self._exempt((layer, gemm), f"{gemm} {found}, below {self._bounds.min_sqnr:g} dB")

    def _meet_loss(self) -> None:
        self._trying("the loss of all together", 1)
        if self._bounds.allows_gap(self._gap(self._out)):
            return
        candidates = [key for key in self._keys() if key[1] == Gemm.FPROP and key not in self._out]
        moves = {}
        for number, key in enumerate(candidates):
            self._trying(f"the loss with {key[0]} alone", len(candidates) - number)
            moves[key] = self._gap(set(self._keys()) - {key})
        flops = self._flops()

        def worth(key: Key) -> float:
            return math.inf if math.isnan(moves[key]) else abs(moves[key]) / max(flops[key], 1)

        out: list[Key] = []
        for key in sorted(candidates, key=worth, reverse=True):
            out.append(key)
            self._trying(f"the loss without {key[0]}", 1)
            if self._bounds.allows_gap(self._gap(self._out.union(out))):
                break
        for key in sorted(out, key=flops.__getitem__, reverse=True):
            fewer = [other for other in out if other != key]
            self._trying(f"the loss with {key[0]} again", 1)
            if fewer and self._bounds.allows_gap(self._gap(self._out.union(fewer))):
                out = fewer
        for key in out:
            self._exempt(key, f"{key[1]} alone moves the loss by {moves[key]:+.4%}")

    def _gap(self, out: set[Key]) -> float:
        """By what share the loss differs from BF16 with everything but `out` in MXFP8."""
        loss = self._session.run(Run(quantized=lambda key: key not in out)).loss
        self._on_run()
        gap = loss_gap(loss, self._reference)
        return math.nan if gap is None else gap

    # ----------------------------------------------------------------------------------------------

    def _exempt(self, key: Key, reason: str) -> None:
        if key not in self._out:
            self._out.add(key)
            self._reasons.setdefault(key[0], []).append(reason)

    def _keys(self) -> Iterable[Key]:
        """The GEMMs the policy puts in MXFP8, by layer and kind, in graph order."""
        return dict.fromkeys(site.key for site in self._session.sites.products)

    def _flops(self) -> dict[Key, int]:
        """Operations of the GEMMs, those of one name together."""
        flops: dict[Key, int] = {}
        for gemm in self._session.report().gemms:
            key = gemm.name, gemm.gemm
            flops[key] = flops.get(key, 0) + gemm.flops
        return flops
