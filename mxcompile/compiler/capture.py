"""A captured graph as the backend sees it: its inputs, its place in the model, its identity."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from mxcompile.compiler.derivatives import mark_derivatives
from mxcompile.compiler.frames import Frame
from mxcompile.compiler.gathers import Gathers, gathers_of
from mxcompile.compiler.locate import Located, name_of, source_of_input
from mxcompile.compiler.plans import Planned, plan_of
from mxcompile.compiler.regions import inline_regions
from mxcompile.models.blocks import Blocks
from mxcompile.models.names import GraphInput, module_of, source_of
from mxcompile.report.files import rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Capture:
    """A graph as Dynamo handed it over.

    inputs: what each is, by its path below `path`. root: the user's model, if known. prefix: path in it of
    the module whose frame this is, as far as guards on its parameters go. module: the same by the frame's
    ``self``. path: what the names of the graph's layers start with. blocks: of the model. owner: the source,
    in Dynamo's terms, of the module at `prefix`. cut: why the graph is but a part of the model, "" if it is
    all. stage: whether the model is a stage of a pipeline, whose other layers are in other processes.
    backward: whether it is that of graphs compiled before. planned: for a part, what is known of the whole.
    gathers: what FSDP2 gathers of its inputs. device: of the first tensor. identity: hash of what names and
    decides the graph's layers; with_sources: the same with what else a report depends on, the lines of the
    user's code and the inputs' shapes among it.
    """

    inputs: tuple[GraphInput, ...]
    root: nn.Module | None
    prefix: str
    module: str
    path: str
    blocks: Blocks
    owner: Any
    cut: str
    stage: bool
    backward: bool
    planned: Planned
    gathers: Gathers
    device: torch.device
    identity: str
    with_sources: str


def captured(gm: fx.GraphModule, example_inputs: Sequence[Any], root: nn.Module | None) -> Capture:
    """Prepare and describe the graph module `gm`, called with `example_inputs`, a part of the model `root`.

    Nested regions are put into `gm`, and the derivatives that it takes are marked.
    """
    inline_regions(gm)
    mark_derivatives(gm)
    frame = Frame.of(gm)
    root, called = frame.root(root), _called(gm, frame)
    cut = frame.cut(root, called) or _sharded(example_inputs)
    located = Located(gm, example_inputs, root or called, frame)
    planned = plan_of(root, frame, located.matrices) if cut else Planned()
    blocks = Blocks.of(root)
    shared = tuple(given.others for given in located.inputs)
    gathers = gathers_of(root, located.path, located.inputs)
    about = (blocks, located.prefix, located.path, cut, planned.below(located.prefix), shared, _rank(gm))
    return Capture(
        inputs=located.inputs,
        root=root,
        prefix=located.prefix,
        module=located.module,
        path=located.path,
        blocks=blocks,
        owner=located.owner,
        cut=cut,
        stage=frame.is_stage,
        backward=frame.backward,
        planned=planned,
        gathers=gathers,
        device=_device(example_inputs),
        identity=_hash(_identity(gm, about)),
        with_sources=_hash((gathers, *_details(gm, example_inputs, about))),
    )


def _sharded(example_inputs: Sequence[Any]) -> str:
    """Why the layers of a graph are but shards of the model's, or ""."""
    return "shards of tensor parallelism" if any(map(_is_shard, example_inputs)) else ""


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


def _called(gm: fx.GraphModule, frame: Frame) -> nn.Module | None:
    """The module that a compiled function calls, if it calls just one."""
    stacks = (node.meta.get("nn_module_stack") for node in gm.graph.nodes)
    outermost = {next(iter(stack.values()))[0] for stack in stacks if stack}
    candidates = [frame.evaluate(path) for path in outermost]
    return candidates[0] if len(candidates) == 1 and isinstance(candidates[0], nn.Module) else None


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


def _identity(gm: fx.GraphModule, about: Any) -> Iterator[Any]:
    """Returns what tells apart graphs that compute alike but are named or decided differently."""
    yield about
    for node in gm.graph.nodes:
        yield node.op, name_of(source_of_input(node)) if node.op == "placeholder" else module_of(node)


def _details(gm: fx.GraphModule, example_inputs: Sequence[Any], about: Any) -> Iterator[Any]:
    """Everything a report depends on."""
    yield from _identity(gm, about)
    for node in gm.graph.nodes:
        target = node._pretty_print_target(node.target)
        yield target, str(node.args), str(node.kwargs), source_of(node)
        value = node.meta.get("example_value")
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            yield tuple(map(str, value.shape)), str(value.dtype), str(value.device)
            yield value.requires_grad
    for value in example_inputs:
        yield isinstance(value, nn.Parameter)
    yield torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    for kind in ("cpu", "cuda"):
        yield torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    for child in gm.children():
        if isinstance(child, fx.GraphModule):
            yield from _details(child, (), about)
