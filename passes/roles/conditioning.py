"""conditioning: scales, shifts or gates a residual stream from outside, or feeds such a layer.

Its input is outside if it comes from no token of the stream (time steps, guidance, a pooled text), or if it
is pooled from the whole stream, so that the result is broadcast over the stream again.
"""

from __future__ import annotations

from mxcompile.passes.roles.site import Site, named
from mxcompile.passes.roles.sources import WHOLE, Source
from mxcompile.passes.roles.statement import Fails, Holds, Statement, clause
from mxcompile.passes.roles.uses import BRANCH, MIXED, QKV, SCALES, SHIFTS, STARTS
from mxcompile.policy import Role


def _shifts_stream(site: Site) -> Holds | Fails:
    number = site.model.joined.get(site.node) if site.used(BRANCH | STARTS) else None
    conditions_others, is_body = (site.model.read_for[number, kind] > 0 for kind in (True, False))
    if site.used(SHIFTS) and not (site.used(STARTS) and is_body):
        return Holds("its result scales, shifts or gates a residual stream that it does not depend on")
    if site.used(SCALES) and _is_pooled(site):
        return Holds(
            "its result scales a residual stream, broadcast over it, and its input is pooled from one"
        )
    if site.all_followers(Role.CONDITIONING):
        layers = named(site.followers)
        return Holds(f"its result goes to nothing but {layers}, which condition a residual stream")
    if conditions_others and not is_body:
        return Holds("its result joins a residual stream that nothing but conditioning reads")
    return Fails("its result scales, shifts or gates no residual stream from outside")


def _is_pooled(site: Site) -> bool:
    origins = site.beyond
    layers = [s for s in origins if site.model.feeds.kind[s] is Source.LAYER]
    for layer in layers:  # the first layer of squeeze and excitation
        origins = {**origins, **Site(layer, site.model).origins}
    streams = [marks for source, marks in origins.items() if site.model.feeds.kind[source] in _POOLED]
    return bool(streams) and not any(marks & WHOLE for marks in streams)


_POOLED = frozenset({Source.STREAM, Source.CONVOLUTION})


_is_no_operand = clause(
    lambda site: not site.used(QKV | MIXED), "", "it is an operand of an attention or a mixer too"
)
CONDITIONING = Statement(role=Role.CONDITIONING, clauses=(_shifts_stream, _is_no_operand))
