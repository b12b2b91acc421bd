"""Delayed scaling: amax histories are buffers of the model, one beside each weight.

    q_proj.weight   →   q_proj.weight_amax_history     FP32 [3, history]: amax of x, w and dy, newest first

The graph gets one input [3] per weight: the largest amax of each operand. In a call that computes gradients
it gets one output per weight: the amax of x and w in this call. The amax of dy arrives as the "gradient" of
the input, which needs ``backward()``; ``torch.autograd.grad`` of selected tensors does not compute it.

Histories advance after forward (x, w) and after backward (dy) of calls that compute gradients. A
recomputation by checkpointing uses the scales of the first run (`repetitions`). A non-finite amax is recorded
as 0. Each rank has its own histories, without a collective: a GEMM is exact under the scales of its own
operands, and ranks of pipelines or experts, which call layers at different times, would deadlock.
`reduce_histories` equalises them on request.

The first call of a graph with delayed scales adds the buffers to the modules that hold its weights, also if a
function is compiled. They are saved and moved with the model. The history of a weight without a module is an
attribute of the tensor, which all graphs share. To load a state dict with histories before the first call,
use `mxcompile.compile` or `Backend(root=…)`: both get the model before it runs, and prepare it (`expect`).
"""

from __future__ import annotations

import functools
import inspect
import logging
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._dynamo.eval_frame import skip_code
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor

from mxcompile import ops
from mxcompile.compiler.calls.repetitions import CheckpointRegions
from mxcompile.compiler.capture.capture import Capture
from mxcompile.compiler.capture.prepare import copied
from mxcompile.compiler.session.frames import called_models, running
from mxcompile.compiler.session.session import session_of
from mxcompile.models.tree import Holders
from mxcompile.policy import Policy

log = logging.getLogger(__name__)

SUFFIX = "_amax_history"
"""Suffix of a history buffer's name, after the name of its weight."""

_DDP_IGNORES = "_ddp_params_and_buffers_to_ignore"
"""Attribute with the names of parameters and buffers that DDP ignores."""


def needed(policy: Policy) -> bool:
    """Whether `policy` uses delayed scales for any layer."""
    return any(
        choices.scaling == "delayed" or (choices.amax is not None and choices.amax.stateful)
        for choices in (policy.base.formats, *(rule.use for rule in policy.rules))
    )


def expect(root: nn.Module) -> None:
    """Lets `root` load state dicts with histories before it has history buffers."""
    session = session_of(root)
    if not session.loads_histories:
        session.loads_histories = True
        root.register_load_state_dict_pre_hook(_make_room)


def _make_room(root: nn.Module, state: Mapping[str, Any], prefix: str, *_rest: object) -> None:
    modules = dict(root.named_modules())
    for key, value in state.items():
        path, _dot, name = key.removeprefix(prefix).rpartition(".")
        module = modules.get(path) if key.startswith(prefix) and name.endswith(SUFFIX) else None
        weight = None if module is None else getattr(module, name.removesuffix(SUFFIX), None)
        if module is not None and isinstance(weight, Tensor) and name not in module._buffers:
            module.register_buffer(name, torch.zeros_like(value, device=weight.device))
            # DDP would overwrite the buffer with rank 0's in every forward
            setattr(root, _DDP_IGNORES, [*getattr(root, _DDP_IGNORES, ()), key.removeprefix(prefix)])


@torch.no_grad()
def reduce_histories(model: nn.Module, group: dist.ProcessGroup | None = None) -> int:
    """Replaces the amax histories of `model` by their maximum over ranks, in one all-reduce.

    Called after every step it corresponds to Transformer Engine's ``reduce_amax``. Called before saving it
    makes the state dict of one rank valid for all. Without an initialised process group nothing changes.

    Args:
        model: The model, with the same history buffers on every rank of `group`.
        group: Process group. Default: all ranks.

    Returns:
        Number of histories of the model.
    """
    buffers = [buffer for name, buffer in model.named_buffers() if name.endswith(SUFFIX)]
    if buffers and dist.is_available() and dist.is_initialized():
        device = buffers[0].device
        joined = torch.cat([buffer.detach().flatten().to(device) for buffer in buffers])
        dist.all_reduce(joined, dist.ReduceOp.MAX, group=group)
        parts = joined.split([buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view_as(buffer))
    return len(buffers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tapped:
    """A graph with an additional scale-state input for each weight.

    states: fake values of the additional inputs. positions: positions of the weights among the inputs.
    outputs: number of the original outputs.
    """

    gm: fx.GraphModule
    states: tuple[Tensor, ...]
    positions: tuple[int, ...]
    outputs: int


def tap(gm: fx.GraphModule, values: Sequence[Any], capture: Capture, policy: Policy) -> Tapped | None:
    """Returns a copy of `gm` with scale-state inputs for its weights, or None if `policy` needs none."""
    if capture.backward or not needed(policy):
        return None
    gm = copied(gm)
    inputs = gm.graph.find_nodes(op="placeholder")
    (output,) = gm.graph.find_nodes(op="output")
    (results,) = output.args
    chosen = tuple(
        index
        for index, entry in enumerate(capture.inputs)
        if entry.static and entry.path and _is_matrix(values[index])
        if inputs[index].users and output not in inputs[index].users
    )
    if not chosen or not isinstance(results, tuple | list):
        return None
    with gm.graph.inserting_after(inputs[-1]):
        states = [gm.graph.placeholder(f"mx_state_{index}") for index in reversed(chosen)][::-1]
    seen = [_tap(gm.graph, states[-1], inputs[i], s) for i, s in zip(chosen, states, strict=True)]
    trains = torch.is_grad_enabled() and any(
        isinstance(value, Tensor) and value.requires_grad for value in values
    )
    if trains:  # other calls do not advance histories
        output.args = ((*results, *seen),)
    gm.recompile()
    context = TracingContext.try_get()
    with (None if context is None else context.fake_mode) or nullcontext():
        devices = (values[index].device for index in chosen)
        examples = tuple(torch.zeros(3, device=device, requires_grad=trains) for device in devices)
    return Tapped(gm=gm, states=examples, positions=chosen, outputs=len(results))


def _is_matrix(value: Any) -> bool:
    plain = type(value) in (Tensor, nn.Parameter) or isinstance(value, FakeTensor)
    return plain and value.ndim > 1 and value.is_floating_point() and value.layout is torch.strided


def _tap(graph: fx.Graph, last: fx.Node, weight: fx.Node, state: fx.Node) -> fx.Node:
    """Inserts `ops.tapped` for `weight` after input `last`. Returns the node with the amax of this call."""
    state._dynamo_source = None
    with graph.inserting_after(last):
        tapped = graph.call_function(ops.tapped, (weight, state))
    with graph.inserting_after(tapped):
        itself = graph.call_function(operator.getitem, (tapped, 0))
        seen = graph.call_function(operator.getitem, (tapped, 1))
    weight.replace_all_uses_with(itself, delete_user_cb=lambda user: user is not tapped)
    return seen


Place = tuple[dict[str, Any], str]
"""The dict of a history, a module's buffers or a tensor's attributes, and its key there."""


class DelayedScales:
    """Passes scales to the code of a tapped graph and advances the histories.

    lengths: history length of each weight with delayed scales, by its position among the tapped weights.
    """

    def __init__(self, tapped: Tapped, lengths: Mapping[int, int], capture: Capture) -> None:
        self._positions, self._outputs = tapped.positions, tapped.outputs  # not `tapped`: it holds parameters
        self._lengths = dict(lengths)
        self._trains = any(state.requires_grad for state in tapped.states)
        self._models = [*capture.readers, *map(weakref.ref, capture.tree.roots.values())]
        self._paths = {index: capture.inputs[self._positions[index]].path for index in lengths}
        self._modules = capture.tree.modules
        self._holders = Holders()

    def run(self, code: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Runs `code` with the original inputs `args` and advances the histories."""
        weights = [args[position] for position in self._positions]
        places = {index: self._owner(index, weights[index]) for index in self._lengths}
        histories = {
            index: _history(*places[index], weights[index], length) for index, length in self._lengths.items()
        }
        regions = CheckpointRegions.around()
        states = self._states(weights, places, histories, regions)
        results = code(*args, *states.unbind(0))
        outputs, seen = results[: self._outputs], results[self._outputs :]
        if states.requires_grad and not regions.trained:
            _shift({index: seen[index].detach() for index in histories}, histories, rows=slice(0, 2))
        return outputs

    def _states(
        self,
        weights: list[Tensor],
        places: dict[int, Place],
        histories: dict[int, Tensor],
        regions: CheckpointRegions,
    ) -> Tensor:
        """Returns the largest amax of each history, FP32 [weights, 3], with a hook that records dy's amax.

        Rows start at multiples of 16 bytes, because Inductor copies unaligned inputs.
        """
        with torch.no_grad():
            states = torch.empty(len(weights), 4, dtype=torch.float32, device=weights[0].device)[:, :3]
            rows = [states.new_zeros(3)] * len(weights)
            for index, amax in _largest(histories).items():
                buffers, name = places[index]
                kept = regions.kept((id(buffers), name))
                rows[index] = (amax if kept is None else kept).to(weights[index].device)
                regions.keep((id(buffers), name), rows[index])
            torch.stack(rows, out=states)
        if self._trains and torch.is_grad_enabled():
            states.requires_grad_()
            states.register_hook(functools.partial(_shift, histories=histories, rows=slice(2, 3)))
        return states

    def _owner(self, index: int, weight: Tensor) -> Place:
        """Returns the place of the history of tapped weight `index`."""
        name, attributes = f"weight{SUFFIX}", vars(weight)
        if name in attributes:
            return attributes, name
        holder = self._holders.holder(weight)
        if holder is None:  # a new parameter, or Dynamo reuses the code for another model
            captured = (model for reference in self._models if (model := reference()) is not None)
            models = (*called_models().values(), *running(), *captured)
            self._holders.add(module for model in models for module in model.modules())
            holder = self._holders.holder(weight)
        outer, _, of_weight = self._paths[index].rpartition(".")
        if holder is None and not isinstance(weight, nn.Parameter) and outer in self._modules:
            holder = self._modules[outer], of_weight  # a tensor in place of the parameter in this call
        if holder is not None:
            return holder[0]._buffers, f"{holder[1]}{SUFFIX}"
        log.warning(
            "no module has %s as a parameter or buffer: its amax history stays with the tensor, outside of"
            " state dicts",
            self._paths[index],
        )
        return attributes, name


def _history(buffers: dict[str, Any], name: str, weight: Tensor, length: int) -> Tensor:
    """Returns the history `name` of `buffers`, after creating it, or resizing it to `length`, in FP32.

    A conversion of the model to another dtype converts its histories too.
    """
    history = buffers.get(name)
    if history is None or history.shape != (3, length) or history.dtype is not torch.float32:
        with torch.inference_mode(False), torch.no_grad():  # later steps could not update an inference tensor
            kept = torch.zeros(3, length, dtype=torch.float32, device=weight.device)
            if history is not None and history.ndim == 2:
                count = min(length, history.shape[1])
                kept[:, :count] = history[:, :count]
        buffers[name] = history = kept
    return history


def _same_shapes(histories: Mapping[int, Tensor]) -> Iterable[dict[int, Tensor]]:
    """Groups histories by device and shape, so that one kernel handles a whole group."""
    groups: dict[object, dict[int, Tensor]] = {}
    for index, history in histories.items():
        groups.setdefault((history.device, history.shape), {})[index] = history
    return groups.values()


def _largest(histories: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Returns the largest amax of each operand, [3], by history."""
    groups = ((group, torch.stack([*group.values()]).amax(-1)) for group in _same_shapes(histories))
    return {index: row for group, rows in groups for index, row in zip(group, rows.unbind(0), strict=True)}


@torch.no_grad()
def _shift(seen: Mapping[int, Tensor] | Tensor, histories: Mapping[int, Tensor], rows: slice) -> None:
    """Shifts `rows` of the histories by one column and inserts the amax values of `seen` at the front."""
    for group in _same_shapes(histories):
        chosen = [history[rows] for history in group.values()]
        new = torch.stack([seen[index][rows] for index in group]).to(chosen[0].device)
        new = new.nan_to_num(0.0, posinf=0.0).unsqueeze(-1)
        moved = torch.cat([new, torch.stack(chosen)[..., :-1]], dim=-1)
        torch._foreach_copy_(chosen, [*moved.unbind(0)])


skip_code(inspect.unwrap(_shift).__code__)  # Dynamo would compile it as a graph of the user's
