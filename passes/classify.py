"""classify: give every GEMM its role, from the structure of the graph, and the evidence for it.

Four sweeps over the forward, each linear in its size: residual streams (`roles.streams`), the sources of
every value (`roles.feeds`), its uses (`roles.uses`), and, from the last layer to the first, the statements
about roles (`roles.precedence`). No sweep reads names of modules or parameters.

A product with a parameter that is not a linear layer (a query, a mix of scores) becomes a product of
activations here, so no policy can quantize it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from mxcompile.graph.tags import Evidence, GemmTag, Kind, set_tag, tags_of
from mxcompile.models.names import GraphInput
from mxcompile.passes.roles.cuts import ends, live
from mxcompile.passes.roles.feeds import Feeds
from mxcompile.passes.roles.flow import DERIVATIVE, dependencies
from mxcompile.passes.roles.precedence import role_of
from mxcompile.passes.roles.products import Products
from mxcompile.passes.roles.site import Model, Site
from mxcompile.passes.roles.streams import Streams
from mxcompile.passes.roles.traits import traits_of
from mxcompile.passes.roles.uses import CUT, RESULT, UsesSweep
from mxcompile.policy import Gemm, Role

Verdicts = dict[str, tuple[Role, Evidence]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Classify:
    """Sets roles.

    inputs: inputs of the captured graph. is_cut: whether other parts of the model compute the graph's inputs
    and read its outputs.
    """

    name: ClassVar[str] = "classify"
    inputs: tuple[GraphInput, ...] = ()
    is_cut: bool = False

    def apply(self, graph: fx.Graph) -> None:
        """Sets role and evidence in every tag of `graph`."""
        depends = dependencies(graph, self.inputs)
        forward = [node for node in live(graph) if not depends[node] & DERIVATIVE]
        traits = traits_of(forward)
        streams = Streams(forward, depends, traits)
        cuts = frozenset(graph.find_nodes(op="placeholder") if self.is_cut else ())
        origins = Feeds(forward, depends, traits, streams, cuts)
        end = CUT if self.is_cut else RESULT
        uses = UsesSweep(traits, origins, streams).run(forward, ends(graph, depends), end)
        model = Model(origins, uses, has_streams=bool(streams.joins), is_cut=self.is_cut)
        verdicts = _of_products(origins.products)
        for node in reversed(origins.layers):
            verdicts[node.name] = role, _ = role_of(Site(node, model))
            model.set_role(node, role)
        no_layer = {node.name for node in origins.products.no_layer}
        for node in graph.nodes:
            if tags := tags_of(node):
                set_tag(node, *(_classified(tag, verdicts, tag.layer in no_layer) for tag in tags))


def _of_products(products: Products) -> Verdicts:
    """Returns the roles of products in attentions that the model writes out as operators."""
    verdicts: Verdicts = {}
    for node, reason in products.no_layer.items():
        verdicts[node.name] = Role.ATTN_SCORES, Evidence(holds=f"no linear layer but {reason}")
    for values, attention in products.attentions.items():
        verdicts[values.name] = Role.ATTN_VALUES, Evidence(holds="a product with the softmax of scores")
        for scores in attention.scores:
            verdicts[scores.name] = Role.ATTN_SCORES, Evidence(holds="a softmax of its result weights values")
    return verdicts


def _classified(tag: GemmTag, verdicts: Verdicts, is_product: bool) -> GemmTag:
    if tag.kind is Kind.ATTENTION:
        return replace(tag, evidence=Evidence(holds="inside an attention operator"))
    role, evidence = verdicts.get(tag.layer, (Role.OTHER, Evidence(holds=_UNKNOWN.get(tag.kind, ""))))
    if is_product:
        gemm = tag.gemm if tag.gemm is Gemm.FPROP else Gemm.DGRAD
        tag = replace(tag, kind=Kind.PRODUCT, gemm=gemm, tensors=("x", "x"))
    return replace(tag, role=role, evidence=evidence)


_UNKNOWN = {
    Kind.PRODUCT: "a product of activations, in no softmax attention",
    Kind.TANGENT: "a product of a forward-mode derivative",
    Kind.CONVOLUTION: "a convolution of more than one pixel, not a linear layer",
    Kind.OPAQUE: "inside an operator that passes cannot rewrite",
    Kind.QUANTIZED: "quantized by the model",
}
