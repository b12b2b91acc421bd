"""Delayed scaling: amax histories are buffers of the model, one beside each weight.

    q_proj.weight   →   q_proj.weight_amax_history     FP32 [3, history]: amax of x, w and dy, newest first

The graph gets one input [3] per weight: the largest amax of each operand. In a call that computes gradients
it gets one output per weight: the amax of x and w in this call. The amax of dy arrives as the "gradient" of
the input, which needs ``backward()``; ``torch.autograd.grad`` of selected tensors does not compute it.

Histories advance after forward (x, w) and after backward (dy) of calls that compute gradients. A
recomputation by checkpointing uses the scales of the first run. A non-finite amax is recorded as 0. Each rank
has its own histories, without a collective: a GEMM is exact under the scales of its own operands, and ranks
of pipelines or experts, which call layers at different times, would deadlock. `reduce_histories` equalises
them on request.

Buffers are registered when a graph with delayed scales is compiled; they are saved and moved with the model.
To load a state dict with histories before the first call, use `mxcompile.compile` or `Backend(root=…)`: both
get the model before it runs, and prepare it (`expect`).
"""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor

from mxcompile import ops
from mxcompile.compiler.capture.capture import Capture
from mxcompile.compiler.hooks.trace import copied
from mxcompile.compiler.session.frames import running
from mxcompile.compiler.session.session import session_of
from mxcompile.models.names import Owner
from mxcompile.models.tree import Holders
from mxcompile.policy import Policy
from mxcompile.watch.steps import in_backward

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
        weight = module._parameters.get(name.removesuffix(SUFFIX)) if module is not None else None
        if module is not None and weight is not None and name not in module._buffers:
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


class DelayedScales:
    """Passes scales to the code of a tapped graph and advances the histories.

    lengths: history length of each weight with delayed scales, by its position among the tapped weights.
    """

    def __init__(self, tapped: Tapped, lengths: Mapping[int, int], root: nn.Module | None) -> None:
        self._positions, self._outputs = tapped.positions, tapped.outputs  # not `tapped`: it holds parameters
        self._lengths = dict(lengths)
        self._trains = any(state.requires_grad for state in tapped.states)
        self._root = None if root is None else weakref.ref(root)
        self._holders = Holders()
        self._apart: dict[int, nn.Module] = {}
        self._read: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()

    def run(self, code: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Runs `code` with the original inputs `args` and advances the histories."""
        weights = [args[position] for position in self._positions]
        owners = {index: self._owner(index, weights[index]) for index in self._lengths}
        histories = {
            index: _history(*owners[index], weights[index], length) for index, length in self._lengths.items()
        }
        rerun = in_backward() and all(name in self._read.get(module, ()) for module, name in owners.values())
        states = self._states(weights, owners, histories, rerun=rerun)
        results = code(*args, *states.unbind(0))
        outputs, seen = results[: self._outputs], results[self._outputs :]
        if states.requires_grad and not rerun:
            _shift({index: seen[index].detach() for index in histories}, histories, rows=slice(0, 2))
        return outputs

    def _states(
        self, weights: list[Tensor], owners: dict[int, Owner], histories: dict[int, Tensor], *, rerun: bool
    ) -> Tensor:
        """Returns the largest amax of each history, FP32 [weights, 3], with a hook that records dy's amax.

        Rows start at multiples of 16 bytes, because Inductor copies unaligned inputs.
        """
        keeps = self._trains and torch.is_grad_enabled()
        with torch.no_grad():
            states = torch.empty(len(weights), 4, dtype=torch.float32, device=weights[0].device)[:, :3]
            rows = [states.new_zeros(3)] * len(weights)
            figures = {} if rerun else _largest(histories)
            for index in histories:
                module, name = owners[index]
                amax = self._read[module].pop(name) if rerun else figures[index]
                rows[index] = amax.to(weights[index].device)
                if keeps and not in_backward():
                    self._read.setdefault(module, {})[name] = rows[index]
            torch.stack(rows, out=states)
        if keeps:
            states.requires_grad_()
            states.register_hook(lambda seen: _shift(dict(enumerate(seen)), histories, rows=slice(2, 3)))
        return states

    def _owner(self, index: int, weight: Tensor) -> Owner:
        """Returns the module of tapped weight `index`, and the name of its history buffer."""
        holder = self._holders.holder(weight)
        if holder is None and self._root is not None and (root := self._root()) is not None:
            self._holders.add(root.modules())
            holder = self._holders.holder(weight)
        if holder is None:  # Dynamo reuses the code for another model
            self._holders.add(module for caller in running() for module in caller.modules())
            holder = self._holders.holder(weight)
        if holder is None:
            if index not in self._apart:
                log.warning(
                    "no module of the model has a weight with a delayed scale as its parameter: the amax"
                    " history of the weight is not saved with the model"
                )
            holder = self._apart.setdefault(index, nn.Module()), "weight"
        return holder[0], f"{holder[1]}{SUFFIX}"


def _history(module: nn.Module, name: str, weight: Tensor, length: int) -> Tensor:
    """Returns the buffer `name` of `module`, after creating it, or resizing it to `length`, in FP32.

    A conversion of the model to another dtype converts its histories too.
    """
    buffer = module._buffers.get(name)
    if buffer is None or buffer.shape != (3, length) or buffer.dtype is not torch.float32:
        with torch.inference_mode(False), torch.no_grad():  # later steps could not update an inference tensor
            kept = torch.zeros(3, length, dtype=torch.float32, device=weight.device)
            if buffer is not None and buffer.ndim == 2:
                count = min(length, buffer.shape[1])
                kept[:, :count] = buffer[:, :count]
        module.register_buffer(name, kept)
        buffer = kept
    return buffer


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
def _shift(seen: Mapping[int, Tensor], histories: Mapping[int, Tensor], rows: slice) -> None:
    """Shifts `rows` of the histories by one column and inserts the amax values of `seen` at the front."""
    for group in _same_shapes(histories):
        chosen = [history[rows] for history in group.values()]
        new = torch.stack([seen[index][rows] for index in group]).to(chosen[0].device)
        new = new.nan_to_num(0.0, posinf=0.0).unsqueeze(-1)
        moved = torch.cat([new, torch.stack(chosen)[..., :-1]], dim=-1)
        torch._foreach_copy_(chosen, [*moved.unbind(0)])
