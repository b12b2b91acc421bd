"""A captured graph as the backend sees it: its inputs, its place in the model, its identity."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from mxcompile.compiler.capture.gathers import Gathers, gathers_of
from mxcompile.compiler.capture.locate import Located, name_of, source_of_input
from mxcompile.compiler.capture.marks import mark
from mxcompile.compiler.capture.regions import inline_regions
from mxcompile.compiler.frames import Frame
from mxcompile.compiler.session.plans import plan_of
from mxcompile.compiler.session.session import Planned
from mxcompile.models.blocks import Blocks
from mxcompile.models.names import GraphInput, module_of, source_of
from mxcompile.models.tree import Tree
from mxcompile.report.files import rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Capture:
    """A graph as Dynamo handed it over.

    inputs: what each is. root: the user's model, if known. tree: its modules and tensors. prefix: path of the
    module that the graph's parameters are read through. module: path of the module whose code the frame is.
    blocks: of the model. owner: the source, in Dynamo's terms, of the module at `prefix`. cut: why the graph
    is but a part of the model, "" if it is all. stage: whether the model is a stage of a pipeline, whose
    other layers are in other processes. backward: whether it is that of graphs compiled before. planned: for
    a part, what is known of the whole. gathers: what FSDP2 gathers of its inputs. device: of the first
    tensor. identity: hash of everything that the report of the graph depends on, the lines of the user's code
    and the inputs' shapes among it.
    """

    inputs: tuple[GraphInput, ...]
    root: nn.Module | None
    tree: Tree
    prefix: str
    module: str
    blocks: Blocks
    owner: Any
    cut: str
    stage: bool
    backward: bool
    planned: Planned
    gathers: Gathers
    device: torch.device
    identity: str


def captured(gm: fx.GraphModule, example_inputs: Sequence[Any], root: nn.Module | None) -> Capture:
    """Prepare and describe the graph module `gm`, called with `example_inputs`, a part of the model `root`.

    Nested regions are put into `gm`, and nodes are marked for the passes.
    """
    frame = Frame.of(gm)
    root = frame.root(root)
    located = Located(gm, example_inputs, root, frame)
    inline_regions(gm, located.inputs)
    mark(gm)
    sharded = "shards of tensor parallelism" if any(map(_is_shard, example_inputs)) else ""
    cut = frame.cut(root, _called(gm, located)) or sharded
    planned = plan_of(root, frame, located.matrices) if cut else Planned()
    blocks = Blocks.of(root)
    gathers = gathers_of(root, located.inputs)
    about = (blocks, located.prefix, cut, planned.below(located.prefix), located.inputs, _rank(gm))
    return Capture(
        inputs=located.inputs,
        root=root,
        tree=located.tree,
        prefix=located.prefix,
        module=located.module,
        blocks=blocks,
        owner=located.owner,
        cut=cut,
        stage=frame.is_stage,
        backward=frame.backward,
        planned=planned,
        gathers=gathers,
        device=_device(example_inputs),
        identity=_hash((gathers, *_details(gm, example_inputs, about))),
    )


def _is_shard(value: object) -> bool:
    return any(kind.__name__ == "DTensor" for kind in type(value).__mro__)


def _rank(gm: fx.GraphModule) -> int | None:
    """The rank of this process, if code of `gm` may depend on it: where tensors are shards.

    Torch's key of such a graph is the same on every rank, so a rank may be given another's code from caches
    they share, which takes the other's part of a tensor: https://github.com/pytorch/pytorch/issues/188390.
    """
    graphs = (module.graph for module in gm.modules() if isinstance(module, fx.GraphModule))
    values = (node.meta.get("example_value") for graph in graphs for node in graph.nodes)
    return rank() if any(map(_is_shard, values)) else None


def _called(gm: fx.GraphModule, located: Located) -> nn.Module | None:
    """The module that a compiled function calls, if it calls just one."""
    stacks = (node.meta["nn_module_stack"] for node in gm.graph.nodes)
    outermost = {next(iter(stack)).partition("@")[0] for stack in stacks if stack}
    return located.holder if outermost == {str(id(located.holder))} else None


def _device(example_inputs: Sequence[Any]) -> torch.device:
    """The device the graph computes on: an accelerator if any input is on one."""
    devices = [value.device for value in example_inputs if isinstance(value, torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def _hash(parts: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(repr(part).encode())
        digest.update(b"\n")
    return digest.hexdigest()


def _size(value: Any) -> Any:
    """Returns a size as it counts for a report: a symbolic one with its value in this call."""
    if not isinstance(value, torch.SymInt):
        return value if isinstance(value, int) else None
    if value.node.is_nested_int():
        return "ragged"
    return str(value), value.node.hint if value.node.has_hint() else None


def _details(gm: fx.GraphModule, example_inputs: Sequence[Any], about: Any) -> Iterator[Any]:
    """Everything a report depends on."""
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
