"""The plan of a model: the role of every layer of the whole, however it is cut when it is compiled.

    model ─▶ copy on fake tensors ─▶ equal layers left out ─▶ forward recorded ─▶ find, classify ─▶ Plan

A plan knows nothing of a policy: decisions follow from its layers by `Policy.decide`. It is made from shapes
alone; where the code asks for values, those that the inputs decide are computed and the rest is assumed (see
`assumed`).
"""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_map_only

from mxcompile.errors import ModelError
from mxcompile.graph.attention import ATTENTION_FORWARD
from mxcompile.graph.opsets import packet
from mxcompile.graph.shapes import operands
from mxcompile.graph.tags import GemmTag, Kind, gradient_tags, set_tag, tags_of
from mxcompile.models.fake_copy import fake_copy, fake_values
from mxcompile.models.fakes import quiet
from mxcompile.models.isolated import ChildError, isolated
from mxcompile.models.value_tracking_mode import ValueTrackingMode
from mxcompile.models.wrappers import is_wrapped, users_own
from mxcompile.passes.bodies import Bodies
from mxcompile.passes.classify import Classify
from mxcompile.passes.decide import decided, keep_products, obstacle
from mxcompile.passes.find import Find
from mxcompile.passes.hint_expert_splits import HintExpertSplits
from mxcompile.passes.record import record_of
from mxcompile.passes.roles.cuts import live
from mxcompile.passes.unregistered import Unregistered
from mxcompile.plan.record import Differentiated, differentiated, record
from mxcompile.plan.repeats import LeaveOut, Repeats, fold, keep_all
from mxcompile.policy import Layer, Policy, Reason
from mxcompile.report import GemmRecord

log = logging.getLogger(__name__)

Layers = Mapping[str, tuple[GemmTag, ...]]
Decompositions = Mapping[Any, Callable[..., Any]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every layer and every product of a model.

    tags: of the forward GEMMs in order, under their full names. obstacles: by layer, what keeps it from any
    block-scaled format. read: paths of the parameters and buffers that the forward reads. guess: why some of
    the layers may not run in the call that the plan was made for, "" if all of them do. differentiated:
    whether gradients were on in that call.
    """

    tags: tuple[GemmTag, ...]
    obstacles: Mapping[str, Reason] = field(default_factory=dict)
    read: frozenset[str] = frozenset()
    guess: str = ""
    differentiated: bool = False

    @cached_property
    def by_name(self) -> Layers:
        """The GEMMs of every name, in the order they run."""
        tags_by_name: defaultdict[str, list[GemmTag]] = defaultdict(list)
        for tag in self.tags:
            tags_by_name[tag.name].append(tag)
        return {name: tuple(tags) for name, tags in tags_by_name.items()}

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The linear layers and attention products, as a policy's rules see them."""
        return tuple(tag.as_layer() for tag in self.tags)

    def records(self, policy: Policy) -> tuple[GemmRecord, ...]:
        """Returns the decision of `policy` for each GEMM, those of the backward included, as records."""
        return tuple(record_of(tag) for forward in self.tags for tag in self._decided(forward, policy))

    def _decided(self, forward: GemmTag, policy: Policy) -> Iterator[GemmTag]:
        """Yields `forward` and the GEMMs of its backward, with what `policy` says of each."""
        tags = (forward, *itertools.compress(gradient_tags(forward), forward.gradients))
        if not forward.is_layer:
            yield from tags
            return
        decision, obstacle = policy.decide(forward.as_layer()), self.obstacles.get(forward.name)
        yield from (decided(tag, decision, obstacle) for tag in tags)

    def with_more(self, other: Plan | None, read: Iterable[str]) -> Plan:
        """Returns this plan with the layers of `other`, a plan of another call, that this one does not run.

        read: parameters that count as read by either.
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


def make_plan(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    decompositions: Decompositions,
    *,
    whole: bool = False,
) -> Plan:
    """Returns the plan of `model`, called with `args` and `kwargs`.

    A child process makes it, because the forward is the user's program: its changes stay in the child.

    Args:
        model: The model, in whatever wrappers.
        args: The positional arguments of its call.
        kwargs: The named ones.
        decompositions: By overload, those that the graphs of a compile are traced with.
        whole: Whether every layer is recorded, where a few could stand for all equal ones.

    Raises:
        ModelError: If no plan can be made, whatever the forward does.
    """
    model, given = users_own(model), (tuple(args), dict(kwargs))
    failures: list[ModelError] = []
    for way in (way for way in _WAYS if way.leave_out is keep_all or not whole):
        try:
            return isolated(partial(_planned, model, given, decompositions, way))
        except ChildError:
            raise
        except ModelError as error:
            log.info("no plan this way, %s: %s", way, error)
            failures.append(error)
    raise failures[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Way:
    """How the forward is recorded.

    leave_out: takes layers from the model that others stand for. mode: of the fakes. compiling: whether code
    that asks is told that it is being compiled; around graph breaks it is not.
    """

    leave_out: LeaveOut
    mode: Callable[[], FakeTensorMode]
    compiling: bool = True


def _shapes_alone() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


_WAYS = (
    _Way(leave_out=fold, mode=_shapes_alone),
    _Way(leave_out=fold, mode=ValueTrackingMode),
    _Way(leave_out=keep_all, mode=ValueTrackingMode),
    _Way(leave_out=keep_all, mode=ValueTrackingMode, compiling=False),
)
"""Tried in this order: values are assumed where shapes alone do not make a plan."""


def _planned(
    model: nn.Module,
    given: Any,
    decompositions: Decompositions,
    way: _Way,
) -> Plan:
    with quiet(compiling=way.compiling), _without_saved_tensors_hooks():
        mode = way.mode()
        copied = fake_copy(model, mode)
        repeats = way.leave_out(copied, Policy())
        fakes = fake_values(given, mode)
        if is_wrapped(model):
            fakes = _in_dtype(fakes, copied)
        graph = record(copied, *fakes, mode=mode, decompositions=decompositions)
        _check_apart(graph, model)
        HintExpertSplits().apply(graph)
        find, classify = Find(blocks=repeats.blocks), Classify()
        weights, bodies = Unregistered(find=find, classify=classify), Bodies(find=find, classify=classify)
        for step in (find, classify, weights, bodies):
            step.apply(graph)
        keep_products(graph)
        _note_gradients(graph)
    read = live(graph)  # what nothing reads has no role, unless a part of the model has it for a result
    nodes = {tag.layer: node for node in read for tag in tags_of(node)}
    tags = tuple(repeats.expanded(tag for node in read for tag in tags_of(node)))
    obstacles = {tag.name: obstacle(nodes[tag.layer]) for tag in tags if tag.is_layer}
    return Plan(
        tags=tags,
        obstacles={name: reason for name, reason in obstacles.items() if reason},
        read=frozenset(_read(graph, repeats)),
        guess=_guess(mode, repeats),
        differentiated=torch.is_grad_enabled(),
    )


def _guess(mode: FakeTensorMode, repeats: Repeats) -> str:
    """Returns why some layers that were recorded, or left out, may not run in the call; "" if all do."""
    if isinstance(mode, ValueTrackingMode) and mode.notes:
        return mode.notes[0]
    return "equal layers were recorded once" if repeats.standing_for else ""


def _note_gradients(graph: fx.Graph) -> None:
    """Note on the tags of `graph` which of their operands need gradients."""
    by = differentiated(graph)
    for node in graph.nodes:
        tags = tags_of(node)
        if not tags or by[node] is Differentiated.NO or tags[0].kind in (Kind.OPAQUE, Kind.QUANTIZED):
            continue
        needs = [by[operand] is not Differentiated.NO for operand in operands(node)]
        if packet(node) in ATTENTION_FORWARD:
            needs = [True, True]
        elif tags[0].tensors == ("w", "x"):
            needs.reverse()
        again = by[node] is Differentiated.AGAIN
        set_tag(node, *(replace(tag, gradients=(needs[0], needs[1]), again=again) for tag in tags))


def _check_apart(graph: fx.Graph, model: nn.Module) -> None:
    """Raises `ModelError` if `graph`, recorded of a copy, reads parameters of `model` itself."""
    held = vars(graph.owning_module or fx.GraphModule({}, graph))
    constants = {**held, **held["_parameters"], **held["_buffers"]}
    own = {id(parameter) for parameter in model.parameters()}
    if any(id(constants.get(node.target)) in own for node in graph.find_nodes(op="get_attr")):
        raise ModelError(
            f"cannot plan the model: the forward of {type(model).__name__} reaches the model itself from its"
            " copy, by an object that refuses to be copied"
        )


def _read(graph: fx.Graph, repeats: Repeats) -> Iterator[str]:
    """Paths of the parameters and buffers that `graph` reads, also in layers that are left out."""
    for node in graph.find_nodes(op="placeholder"):
        given = node.meta["desc"]
        if given.static and node.users:
            yield given.path
            yield from repeats.others(given.path)


def _in_dtype(given: Any, model: nn.Module) -> Any:
    """Floating-point arguments in the dtype of the parameters, as mixed precision would cast both."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    if dtype is None:
        return given
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, given)


def _without_saved_tensors_hooks() -> AbstractContextManager[Any]:
    """Set aside the hooks of the user's call: checkpointing counts the tensors that its hooks see."""
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return nullcontext()  # there are none, and none are allowed
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
