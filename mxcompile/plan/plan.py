"""The plan of a model: the role of every layer, independent of graph breaks.

    model ─▶ copy on fake tensors ─▶ equal layers folded ─▶ forward recorded ─▶ find, classify ─▶ Plan

A plan does not depend on a policy: `Policy.decide` decides for the plan's layers. Recording needs shapes
alone. Where the model's code reads a tensor's value, values that follow from the inputs are computed, and all
others are assumed (see `value_tracking_mode`).
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mxcompile.errors import ModelError
from mxcompile.graph.attention import ATTENTION_FORWARD
from mxcompile.graph.opsets import packet
from mxcompile.graph.shapes import operands
from mxcompile.graph.tags import GemmTag, Kind, gradient_tags, set_tag, tags_of
from mxcompile.models.fake_copy import fake_copy, fake_values
from mxcompile.models.fakes import quiet
from mxcompile.models.isolated import ChildError, isolated
from mxcompile.models.names import rebased
from mxcompile.models.value_tracking_mode import ValueTrackingMode
from mxcompile.models.wrappers import user_model
from mxcompile.passes.bodies import Bodies
from mxcompile.passes.classify import Classify
from mxcompile.passes.decide import decided, keep_products, obstacle
from mxcompile.passes.find import Find
from mxcompile.passes.hint_expert_splits import HintExpertSplits
from mxcompile.passes.record import record_of
from mxcompile.passes.roles.cuts import live
from mxcompile.passes.unregistered import Unregistered
from mxcompile.plan.record import Differentiated, differentiated, read_nodes, record
from mxcompile.plan.repeats import LeaveOut, fold, keep_all
from mxcompile.policy import Gemm, Layer, Policy, Reason
from mxcompile.report import GemmRecord

log = logging.getLogger(__name__)

Layers = Mapping[str, tuple[GemmTag, ...]]
Decompositions = Mapping[Any, Callable[..., Any]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every layer and every GEMM of a model.

    tags: forward GEMMs in order, under their full names. obstacles: by layer, the reason why no block-scaled
    format suits it. read: paths of the parameters and buffers that the forward reads. guess: reason why some
    of the layers may not run in the recorded call, or "" if all of them do. differentiated: whether gradients
    were enabled in that call.
    """

    tags: tuple[GemmTag, ...]
    obstacles: Mapping[str, Reason] = field(default_factory=dict)
    read: frozenset[str] = frozenset()
    guess: str = ""
    differentiated: bool = False

    @cached_property
    def by_name(self) -> Layers:
        """GEMMs by layer name, in execution order."""
        tags_by_name: defaultdict[str, list[GemmTag]] = defaultdict(list)
        for tag in self.tags:
            tags_by_name[tag.name].append(tag)
        return {name: tuple(tags) for name, tags in tags_by_name.items()}

    @cached_property
    def runs(self) -> Counter[tuple[str, Gemm]]:
        """How often the recorded call and its backward compute each GEMM, by layer name and GEMM."""
        read = (tag for tag in self.tags if not tag.unread)
        return Counter((tag.name, tag.gemm) for forward in read for tag in _with_gradients(forward))

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Linear layers and attention products, in the form that policy rules match."""
        return tuple(tag.as_layer() for tag in self.tags)

    def records(self, policy: Policy) -> tuple[GemmRecord, ...]:
        """Returns one record with the decision of `policy` for each GEMM of forward and backward.

        Leaves out unread GEMMs, which no code computes.
        """
        records: list[GemmRecord] = []
        for forward in (tag for tag in self.tags if not tag.unread):
            tags = _with_gradients(forward)
            if forward.is_layer:
                decision, obstacle = policy.decide(forward.as_layer()), self.obstacles.get(forward.name)
                tags = tuple(decided(tag, decision, obstacle) for tag in tags)
            records += map(record_of, tags)
        return tuple(records)

    def moved(self, old: str, new: str) -> Plan:
        """Returns the plan with names that begin with the model's path `new` instead of `old`."""
        if old == new:
            return self
        return replace(
            self,
            tags=tuple(replace(tag, name=rebased(tag.name, old, new)) for tag in self.tags),
            obstacles={rebased(name, old, new): reason for name, reason in self.obstacles.items()},
            read=frozenset(rebased(path, old, new) for path in self.read),
        )

    def with_more(self, other: Plan | None, read: Iterable[str]) -> Plan:
        """Returns this plan with the further layers of `other`, the plan of another call.

        read: paths of further parameters that count as read.
        """
        if other is None:
            return replace(self, read=self.read.union(read))
        more = tuple(tag for tag in other.tags if tag.name not in self.by_name)
        return replace(
            self,
            tags=self.tags + more,
            obstacles={**other.obstacles, **self.obstacles},
            read=self.read.union(other.read, read),
            guess="layers of several calls" if more else self.guess,
        )


def _with_gradients(forward: GemmTag) -> tuple[GemmTag, ...]:
    return (forward, *itertools.compress(gradient_tags(forward), forward.gradients))


def make_plan(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    decompositions: Decompositions,
    *,
    whole: bool = False,
) -> Plan:
    """Returns the plan of one call of `model`, with or without wrappers.

    A child process makes the plan, because the forward is user code whose side effects must not reach this
    process. Raises `ModelError` if the forward cannot be recorded, or if the child process crashed or hung.

    decompositions: the compile's, by overload. whole: whether to record every one of several equal layers.
    """
    model, inputs = user_model(model), (tuple(args), dict(kwargs))
    failures: list[ModelError] = []
    for way in (way for way in _WAYS if way.leave_out is keep_all or not whole):
        try:
            return isolated(partial(_planned, model, inputs, decompositions, way))
        except ChildError:
            raise
        except ModelError as error:
            log.info("a trace for the plan failed: %s", error)
            failures.append(error)
    raise failures[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Way:
    """One method to record the forward.

    leave_out: folds equal layers. mode: creates the fake tensor mode. compiling: value of
    `torch.compiler.is_compiling()` in the forward; False takes the code path between graph breaks.
    """

    leave_out: LeaveOut
    mode: Callable[[], FakeTensorMode]
    compiling: bool = True


_WAYS = (
    _Way(leave_out=fold, mode=lambda: FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())),
    _Way(leave_out=fold, mode=ValueTrackingMode),
    _Way(leave_out=keep_all, mode=ValueTrackingMode),
    _Way(leave_out=keep_all, mode=ValueTrackingMode, compiling=False),
)
"""Attempts in order. Values are assumed only where shapes alone do not give a plan."""


def _planned(model: nn.Module, inputs: Any, decompositions: Decompositions, way: _Way) -> Plan:
    with quiet(compiling=way.compiling), _without_saved_tensors_hooks():
        mode = way.mode()
        copied = fake_copy(model, mode)
        repeats = way.leave_out(copied, Policy())
        fakes = fake_values(inputs, mode)
        graph = record(copied, *fakes, mode=mode, decompositions=decompositions)
        _check_apart(graph, model)
        HintExpertSplits().apply(graph)
        find, classify = Find(blocks=repeats.blocks), Classify()
        weights, bodies = Unregistered(find=find, classify=classify), Bodies(find=find, classify=classify)
        for step in (find, classify, weights, bodies):
            step.apply(graph)
        keep_products(graph)
        _note_use(graph)
    read = live(graph)  # dead products have no role, unless they are a result of the model
    nodes = {tag.layer: node for node in read for tag in tags_of(node)}
    tags = tuple(repeats.expanded(tag for node in read for tag in tags_of(node)))
    obstacles = {tag.name: obstacle(nodes[tag.layer]) for tag in tags if tag.is_layer}
    entries = (node.meta["desc"] for node in graph.find_nodes(op="placeholder") if node.users)
    paths = [entry.path for entry in entries if entry.static]
    guess = "equal layers were recorded once" if repeats.standing_for else ""
    if isinstance(mode, ValueTrackingMode) and mode.notes:
        guess = mode.notes[0]
    return Plan(
        tags=tags,
        obstacles={name: reason for name, reason in obstacles.items() if reason},
        read=frozenset(itertools.chain(paths, *map(repeats.others, paths))),
        guess=guess,
        differentiated=torch.is_grad_enabled(),
    )


def _note_use(graph: fx.Graph) -> None:
    """Sets `unread`, `gradients` and `recomputed` of each tag in `graph`."""
    by, read = differentiated(graph), read_nodes(graph)
    for node in graph.nodes:
        tags = tags_of(node)
        if node not in read:
            set_tag(node, *(replace(tag, unread=True) for tag in tags))
            continue
        if not tags or by[node] is Differentiated.NO or tags[0].kind in (Kind.OPAQUE, Kind.QUANTIZED):
            continue
        needs = [by[operand] is not Differentiated.NO for operand in operands(node)]
        if packet(node) in ATTENTION_FORWARD:
            needs = [True, True]
        elif tags[0].tensors == ("w", "x"):
            needs.reverse()
        recomputed = by[node] is Differentiated.RECOMPUTED
        set_tag(node, *(replace(tag, gradients=(needs[0], needs[1]), recomputed=recomputed) for tag in tags))


def _check_apart(graph: fx.Graph, model: nn.Module) -> None:
    """Raises `ModelError` if `graph`, recorded from a copy, reads parameters of `model` itself."""
    attributes = vars(graph.owning_module or fx.GraphModule({}, graph))
    constants = {**attributes, **attributes["_parameters"], **attributes["_buffers"]}
    parameters = {id(parameter) for parameter in model.parameters()}
    if any(id(constants.get(node.target)) in parameters for node in graph.find_nodes(op="get_attr")):
        raise ModelError(
            f"cannot plan the model: the forward of {type(model).__name__} reaches the model itself from its"
            " copy, through an object that refuses to be copied: define __deepcopy__ on the object"
        )


def _without_saved_tensors_hooks() -> AbstractContextManager[Any]:
    """Disables the caller's saved-tensor hooks: checkpointing would count recorded tensors."""
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return nullcontext()  # hooks are disabled, and pushing one would raise
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
