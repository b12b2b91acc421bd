"""head: makes a result of the model, alone or with other layers in a row.

It stands behind the residual stream or other layers, and its result joins no stream. Its weight may be the
table of the embeddings. Where the graph was cut, its outputs are not results of the model, and no layer is a
head.
"""

from __future__ import annotations

from mxcompile.passes.roles.site import Site, named
from mxcompile.passes.roles.sources import Source
from mxcompile.passes.roles.statement import Fails, Holds, Statement, clause
from mxcompile.passes.roles.uses import BRANCH, MIXED, QKV, RESULT, SHIFTS, STARTS
from mxcompile.policy import Role


def _makes_result(site: Site) -> Holds | Fails:
    if site.used(RESULT):
        return Holds(
            "its result is an output of the model, with nothing but elementwise operators in between"
        )
    if site.all_followers(Role.HEAD):
        return Holds(f"its result goes to nothing but {named(site.followers)}, a head")
    return Fails("its result is not an output of the model")


def _is_no_part_of_the_body(site: Site) -> Holds | Fails:
    if site.used(BRANCH):
        return Fails("it joins a residual stream first")
    if site.used(QKV | MIXED | STARTS):
        return Fails("it goes on into the model too")
    return Holds("")


def _has_body_before_it(site: Site) -> Holds | Fails:
    if site.streams:
        if site.model.feeds.sources(site.origins, Source.ATTENTION) and not site.used(RESULT):
            return Fails("it is the first layer behind an attention")
        return Holds("it stands behind the residual stream")
    if not site.origins or site.sources(Source.INPUT, Source.CUT):
        return Fails("it reads the model's inputs")
    attentions = site.sources(Source.ATTENTION)
    if attentions and site.model.feeds.pooled.issuperset(attentions):
        return Holds("it stands behind an attention whose queries are parameters, which pools")
    if attentions:
        return Fails("it is straight behind an attention, in a model without residual streams")
    if not site.used(RESULT):
        return Fails("it stands behind no residual stream")
    return Holds("it stands behind other layers")


_does_not_shift = clause(lambda site: not site.used(SHIFTS), "", "it scales or shifts a residual stream")
_is_table = clause(
    lambda site: site.tied,
    "its weight is the table of the embeddings",
    "its weight is not the table of the embeddings",
)
TIED_HEAD = Statement(role=Role.HEAD, clauses=(_is_table,))
HEAD = Statement(
    role=Role.HEAD, clauses=(_makes_result, _is_no_part_of_the_body, _does_not_shift, _has_body_before_it)
)
