"""Projections of token mixers other than a softmax attention.

    mixer_in    its result is an operand of a state-space model or a linear attention, or gates its result
    mixer_out   the layer behind the mixer, whose result joins the residual stream

These operators mix: a product of activations other than a softmax attention, a cumulative sum, a recurrence
over tokens, a Fourier transform. A filter between gates mixes too, unless an activation makes it a
feed-forward network.
"""

from __future__ import annotations

from mxcompile.passes.roles.attention import gates
from mxcompile.passes.roles.site import Site, named
from mxcompile.passes.roles.sources import ACTIVATED, BENT, FILTERED, GATED, Source
from mxcompile.passes.roles.statement import Fails, Holds, Statement, joins_stream
from mxcompile.passes.roles.uses import MIXED
from mxcompile.policy import Role


def _is_mixed(site: Site) -> Holds | Fails:
    if site.used(MIXED):
        return Holds(
            "its result is mixed over tokens by products, sums or a recurrence before the next layer"
        )
    outs = site.followers_of(Role.MIXER_OUT)
    if filtered := [layer for layer in outs if is_filter(site.followers[layer])]:
        return Holds(f"a gated filter over tokens, without an activation, leads to {named(filtered)}")
    gated = [layer for layer in outs if gates(site, layer, Source.PRODUCT) or gates(site, layer, Source.SCAN)]
    if gated and any(marks & BENT for marks in site.followers.values()):
        return Holds(f"its result gates a mixer's, on the way to {named(gated)}")
    return Fails("nothing mixes its result over tokens before the next layer")


def is_filter(marks: int) -> bool:
    """Whether a filter over tokens and a gate are between the layers, and no activation is."""
    return bool(marks & FILTERED and marks & GATED and not marks & ACTIVATED)


def _behind_mixer(site: Site) -> Holds | Fails:
    if site.sources(Source.PRODUCT, Source.SCAN):
        return Holds("its input was mixed over tokens by products, sums or a recurrence")
    if filtered := [layer for layer in site.sources(Source.LAYER) if is_filter(site.beyond[layer])]:
        return Holds(f"a gated filter over tokens, without an activation, leads to it from {named(filtered)}")
    return Fails("nothing mixed its input over tokens")


MIXER_IN = Statement(role=Role.MIXER_IN, clauses=(_is_mixed,))
MIXER_OUT = Statement(role=Role.MIXER_OUT, clauses=(_behind_mixer, joins_stream))
