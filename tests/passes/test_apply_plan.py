"""The pass `apply_plan`: roles of a part of a model from the plan of the whole."""

from __future__ import annotations

from dataclasses import replace

from by_hand import Hand, tag
from torch import fx

from mxcompile.graph.opsets import aten
from mxcompile.graph.tags import GemmTag, Kind
from mxcompile.passes.apply_plan import ApplyPlan
from mxcompile.policy import Gemm, Role


def planned_tag(name: str, role: Role, n: int, k: int, kind: Kind = Kind.LINEAR) -> GemmTag:
    """A forward GEMM of the plan."""
    return GemmTag(
        layer=name, name=name, module="Whole", source="", gemm=Gemm.FPROP, kind=kind, tensors=("x", "w"),
        role=role, n=n, k=k,
    )  # fmt: skip


def layers(*names: str, **facts: object) -> tuple[list[fx.Node], fx.Graph]:
    """Products called `names`, each of 8 columns and a contraction of 4."""
    hand = Hand()
    x, w = hand.input("x", 2, 4), hand.input("w", 4, 8)
    nodes = [hand.gemm(aten.mm.default, x, w, name=name, n=8, k=4, **facts) for name in names]
    return nodes, hand.output(*nodes)


def test_a_layer_and_its_gradient_have_the_role_of_the_whole():
    hand = Hand()
    x, w, dy = hand.input("x", 2, 4), hand.input("w", 4, 8), hand.input("dy", 2, 8)
    fprop = hand.gemm(aten.mm.default, x, w, name="a.up")
    transposed = hand.call(aten.permute.default, w, [1, 0])
    dgrad = hand.gemm(
        aten.mm.default, dy, transposed, name="a.up", layer=fprop.name, gemm=Gemm.DGRAD, role=Role.HEAD
    )
    ApplyPlan(planned={"a.up": (planned_tag("a.up", Role.FFN_IN, 16, 4),)}).apply(hand.output(fprop, dgrad))
    for node in (fprop, dgrad):
        assert (tag(node).role, tag(node).whole, tag(node).module) == (Role.FFN_IN, (16, 4), "Whole")


def test_layer_missing_in_the_plan_keeps_its_role():
    (node,), graph = layers("b", role=Role.HEAD)
    ApplyPlan(planned={"a": (planned_tag("a", Role.FFN_IN, 8, 4),)}).apply(graph)
    assert (tag(node).role, tag(node).whole) == (Role.HEAD, None)


def test_each_run_of_a_layer_has_its_own_if_all_are_here():
    plan = (planned_tag("a", Role.QKV, 8, 4), planned_tag("a", Role.ATTN_OUT, 8, 4))
    both, graph = layers("a", "a")
    ApplyPlan(planned={"a": plan}).apply(graph)
    assert [tag(node).role for node in both] == [Role.QKV, Role.ATTN_OUT]


def test_one_run_of_several_has_the_first_of_its_sizes():
    plan = (planned_tag("a", Role.QKV, 9, 4), planned_tag("a", Role.ATTN_OUT, 8, 4))
    (node,), graph = layers("a")
    ApplyPlan(planned={"a": plan}).apply(graph)
    assert tag(node).role is Role.ATTN_OUT


def test_a_product_is_found_by_its_module_where_sizes_leave_no_choice():
    """The weight of an expert was taken from the stack of all in front of the cut."""
    stack = (
        planned_tag("moe.experts.up", Role.EXPERT_IN, 8, 4),
        planned_tag("moe.experts.down", Role.EXPERT_OUT, 4, 8),
    )
    plan = {layer.name: (layer,) for layer in stack}
    (node,), graph = layers("moe.experts", kind=Kind.PRODUCT)
    ApplyPlan(planned=plan).apply(graph)
    assert tag(node).role is Role.EXPERT_IN
    (node,), graph = layers("moe.experts", kind=Kind.PRODUCT, role=Role.OTHER)
    alike = replace(stack[1], n=8, k=4)
    ApplyPlan(planned=plan | {alike.name: (alike,)}).apply(graph)
    assert tag(node).role is Role.OTHER
