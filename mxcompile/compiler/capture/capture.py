"""Describes a captured graph for the backend: its inputs, its position in the model, its cache key."""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from mxcompile.compiler.capture.locate import Located, name_of, source_of_input
from mxcompile.compiler.capture.prepare import inline_regions, mark
from mxcompile.compiler.session.frames import STAGE, Frame
from mxcompile.compiler.session.session import Planned, plan_of, session_of
from mxcompile.models.blocks import Blocks
from mxcompile.models.fsdp import groups
from mxcompile.models.names import GraphInput, joined, module_of, source_of
from mxcompile.models.tree import Tree
from mxcompile.report.files import rank

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathers:
    """Bytes of this rank's shards of weights that it sends in FSDP2's gathers, in forward and in backward.

    A weight is sent again in backward if it was resharded. Fields `…_without`: bytes without mxcompile.
    """

    forward: int = 0
    forward_without: int = 0
    backward: int = 0
    backward_without: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Capture:
    """A graph from Dynamo. It refers to modules weakly, because Dynamo keeps it with the compiled code.

    `Located` describes `inputs`, `tree`, `prefix`, `module`, `owners` and `readers`. model: the user's model,
    if known. blocks: blocks of the model. cut: reason why the graph covers only a part of the model, "" for
    the whole. stage: whether the model is a pipeline stage. backward: whether compiled autograd compiles the
    backward of earlier graphs. planned: plan of the whole model, if `cut`. gathers: bytes of FSDP2's gathers.
    device: device that the graph computes on, an accelerator if any input is on one. identity: hash of
    everything that the graph's report depends on, including source lines and input shapes.
    """

    inputs: tuple[GraphInput, ...]
    model: weakref.ref[nn.Module] | None
    tree: Tree
    prefix: str
    module: str
    blocks: Blocks
    owners: tuple[tuple[Any, str], ...]
    readers: tuple[weakref.ref[nn.Module], ...]
    cut: str
    stage: bool
    backward: bool
    planned: Planned
    gathers: Gathers
    device: torch.device
    identity: str

    @property
    def root(self) -> nn.Module | None:
        """The user's model, if known and not freed."""
        return None if self.model is None else self.model()


def captured(gm: fx.GraphModule, example_inputs: Sequence[Any], root: nn.Module | None) -> Capture:
    """Prepares and describes `gm`, a graph of the model `root` called with `example_inputs`.

    Nested regions are inlined into `gm`, and its nodes get marks for the passes.
    """
    frame = Frame.from_stack(gm)
    root = frame.root(root)
    located = Located(gm, example_inputs, root, frame)
    inline_regions(gm, located.inputs)  # needs the user's module paths, which `Located` has written
    mark(gm)
    sharded = "shards of tensor parallelism" if any(map(_is_shard, example_inputs)) else ""
    stacks = (node.meta["nn_module_stack"] for node in gm.graph.nodes)
    outermost = {next(iter(stack)).partition("@")[0] for stack in stacks if stack}
    called = located.holder if outermost == {str(id(located.holder))} else None  # if it calls only one
    cut = frame.cut(root, called) or sharded
    if root is not None:
        session_of(root).rename(frame.name_of(root))
    planned = plan_of(root, frame, located.matrices) if cut else Planned()
    blocks = Blocks.from_models(located.tree.roots)
    gathers = gathers_of(root, located.inputs)
    # Torch's cache key of a graph with DTensors is equal on all ranks. A rank could get another rank's code
    # from a shared cache, with the other rank's slices: https://github.com/pytorch/pytorch/issues/188390.
    graphs = (module.graph for module in gm.modules() if isinstance(module, fx.GraphModule))
    values = (node.meta.get("example_value") for graph in graphs for node in graph.nodes)
    mine = rank() if any(map(_is_shard, values)) else None
    about = (blocks, located.prefix, cut, planned.below(located.prefix), located.inputs, mine)
    devices = (value.device for value in example_inputs if isinstance(value, torch.Tensor))
    details = "".join(f"{part!r}\n" for part in (gathers, *_details(gm, example_inputs, about)))
    return Capture(
        inputs=located.inputs,
        model=None if root is None else weakref.ref(root),
        tree=located.tree,
        prefix=located.prefix,
        module=located.module,
        blocks=blocks,
        owners=located.owners,
        readers=tuple(map(weakref.ref, located.readers)),
        cut=cut,
        stage=STAGE in frame.parts,
        backward=frame.backward,
        planned=planned,
        gathers=gathers,
        device=next((d for d in devices if d.type != "cpu"), torch.device("cpu")),
        identity=hashlib.sha256(details.encode()).hexdigest(),
    )


def gathers_of(root: nn.Module | None, inputs: Iterable[GraphInput]) -> Gathers:
    """Returns the bytes for the weights among the `inputs` of a graph of the model `root`.

    FSDP2 gathers each weight outside of compiled graphs, before the graph that reads it is compiled. Its
    state is private: if a torch version has another layout, the counts are 0, with a warning. Gradient
    reductions, which mxcompile does not change, and weights that no compiled graph reads are not counted.
    """
    if root is None:
        return Gathers()
    read = {path for entry in inputs if entry.static for path in (entry.path, *entry.others)}
    total, name = Counter[str](), session_of(root).name
    try:
        for group, parameters in groups(root):
            for path, parameter in parameters:
                outputs = parameter.all_gather_outputs
                if not outputs or joined(name, path) not in read:
                    continue
                num_bytes = sum(output.numel() * output.element_size() for output in outputs)
                sent = num_bytes // group.mesh_info.shard_mesh_size
                dtype = parameter.param_dtype or parameter.orig_dtype
                without = parameter.padded_sharded_param_size.numel() * dtype.itemsize
                total.update(forward=sent, forward_without=without)
                if group.post_forward_mesh_info is not None:  # gathered again in backward
                    total.update(backward=sent, backward_without=without)
    except AttributeError as error:
        log.warning(
            "reports do not count the bytes that FSDP2 of torch %s gathers: %s", torch.__version__, error
        )
        return Gathers()
    return Gathers(**total)


def _is_shard(value: object) -> bool:
    return any(kind.__name__ == "DTensor" for kind in type(value).__mro__)


def _size(value: Any) -> Any:
    """Returns a comparable size; a symbolic size has its value in this call."""
    if not isinstance(value, torch.SymInt):
        return value if isinstance(value, int) else None
    if value.node.is_nested_int():
        return "ragged"
    return str(value), value.node.hint if value.node.has_hint() else None


def _details(gm: fx.GraphModule, example_inputs: Sequence[Any], about: Any) -> Iterator[Any]:
    """Yields everything that a report depends on."""
    yield about
    for node in gm.graph.nodes:
        yield node.op, name_of(source_of_input(node)) if node.op == "placeholder" else module_of(node)
        target = node._pretty_print_target(node.target)
        yield target, str(node.args), str(node.kwargs), source_of(node)
        value = node.meta.get("example_value")
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            yield tuple(map(_size, value.shape)), str(value.dtype), str(value.device), str(value.layout)
            yield tuple(map(_size, value.stride())) if value.layout is torch.strided else ()
            yield value.requires_grad
    for value in example_inputs:
        yield isinstance(value, nn.Parameter), _size(value)
    yield torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    for kind in ("cpu", "cuda"):
        yield torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    for child in gm.children():
        if isinstance(child, fx.GraphModule):
            yield from _details(child, (), about)
