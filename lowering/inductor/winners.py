"""winners: find the kernel that Inductor chose for each GEMM, for the record.

    a product's buffer after fusion  →  its final choice  →  name and tile

The pass runs after Inductor timed and fused kernels, and changes nothing. If Inductor chooses before it
schedules, the buffer does not hold its choice, so `choose`, which the templates call, stores it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch._inductor import config, ir
from torch._inductor.scheduler import BaseSchedulerNode
from torch._inductor.select_algorithm import (
    ExternKernelCaller,
    TritonTemplateCaller,
    autotune_select_algorithm,
)

from mxcompile.formats import ELEMENTS
from mxcompile.graph.tags import tag_of
from mxcompile.lowering.inductor.scheduling import Nodes, SchedulerPass

log = logging.getLogger(__name__)

Report = Callable[[Mapping[int, str]], None]
"""Receives kernels by the index of their GEMM in the graph."""

_CALLERS: WeakKeyDictionary[Any, TritonTemplateCaller] = WeakKeyDictionary()
"""Choices by the function that renders their kernel, which is the only trace of a choice in its buffer."""

_CONFIGS: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""Names that templates give to configurations, by the function that renders the kernel."""

BENCHMARKED = next(
    name for name in ("benchmark_template_fusion", "benchmark_epilogue_fusion") if hasattr(config, name)
)
"""Inductor's setting that times choices with fused neighbours. From torch 2.15 on the second name warns."""

_CALLS = {
    "mx_vendor_scaled_mm": "torch._scaled_mm",
    "mx_vendor_scaled_grouped_mm": "torch._scaled_grouped_mm",
    "mx_vendor_nvfp4_mm": "aten._scaled_mm_v2 (nvfp4)",
    "mx_vendor_mxfp4_mm": "aten._scaled_mm_v2 (mxfp4)",
}
"""The library functions that choices call, by names of the functions that wrap them."""


def choose(
    name: str,
    choices: list[Any],
    operands: Sequence[Any],
    layout: ir.Layout,
    configs: Sequence[str] = (),
    *,
    examples: Mapping[int, Callable[[ir.Buffer], Any]] | None = None,
    at_once: bool = False,
) -> ir.TensorBox:
    """Returns the result of the choice that Inductor makes, now or after fusion.

    configs: name of each choice's configuration for the record; default: its tile. examples: functions that
    make the operands for timing, by position. at_once: whether to choose now, because timing with fused
    neighbours gives no information.
    """
    for choice in choices:
        if isinstance(choice, TritonTemplateCaller):
            _CALLERS[choice.make_kernel_render] = choice
    for choice, config_name in zip(choices, configs, strict=False):
        _CONFIGS[choice.make_kernel_render] = config_name
    inputs = examples if at_once or not getattr(config, BENCHMARKED) else None
    chosen: Any = autotune_select_algorithm(name, choices, list(operands), layout, input_gen_fns=inputs)
    out: ir.TensorBox = chosen[0] if isinstance(chosen, tuple) else chosen
    if examples is not None and inputs is None:
        _time_on(out, examples)
    return out


def _time_on(out: ir.TensorBox, examples: Mapping[int, Callable[[ir.Buffer], Any]]) -> None:
    """Makes Inductor time a choice after fusion on `examples`.

    With examples, Inductor would choose at once. Without them it keeps a closure that times the choice with
    no examples; this function sets them in the closure.
    """
    buffer = out.data.data if isinstance(out.data, ir.StorageBox) else None
    if not isinstance(buffer, ir.MultiTemplateBuffer):
        return
    timed = buffer._choice_timings_fn
    cells = dict(zip(timed.__code__.co_freevars, timed.__closure__ or (), strict=True))
    if "input_gen_fns" in cells:
        cells["input_gen_fns"].cell_contents = dict(examples)
    else:
        log.debug("products are timed on scale bytes of 0: this torch keeps the choice otherwise")


class Winners(SchedulerPass):
    """Reports the kernels that Inductor chose for GEMMs."""

    def __init__(self, uuid: str, user: Any, report: Report) -> None:
        super().__init__(uuid, user)
        self._report = report

    def apply(self, nodes: Nodes) -> Nodes:
        """Reports the kernels of the GEMMs in `nodes`. Returns `nodes` unchanged."""
        kernels = dict(kernel for group in nodes for node in group.get_nodes() for kernel in _kernels(node))
        if kernels:
            self._report(kernels)
        return nodes


def _kernels(node: BaseSchedulerNode) -> Iterable[tuple[int, str]]:
    """Yields index and kernel of the GEMM that `node` computes, if Inductor chose its kernel."""
    buffer = node.node
    if not isinstance(buffer, ir.TritonTemplateBuffer | ir.ExternKernel):
        return
    tags = [tag for origin in buffer.origins if (tag := tag_of(origin)) is not None]
    if isinstance(buffer, ir.ExternKernel):
        called = str(buffer.python_kernel_name).rpartition(".")[2]
        yield from ((tag.index, _CALLS[called]) for tag in tags if called in _CALLS)
        return
    winner = _winner(node, buffer) if tags else None
    if winner is not None:
        for tag in tags:
            yield tag.index, renamed(tag.kernel, winner)


def _winner(node: BaseSchedulerNode, buffer: ir.TritonTemplateBuffer) -> ir.ChoiceCaller | None:
    """Returns the choice of `buffer`; None without a choice, or if the kernel's current name is right."""
    if not isinstance(buffer, ir.MultiTemplateBuffer):
        return _CALLERS.get(buffer.make_kernel_render)
    if buffer.make_kernel_render is not None:  # Inductor chose this kernel when it fused an epilogue
        same = (choice for choice in buffer.choices if isinstance(choice, TritonTemplateCaller))
        return next(choice for choice in same if choice.make_kernel_render is buffer.make_kernel_render)
    if node.scheduler._has_layout_conflict_for_template(buffer):
        return None  # Inductor calls the library, whose kernel the record already names
    return buffer.get_min_choice()[0]


def renamed(kernel: str, winner: ir.ChoiceCaller) -> str:
    """Returns the kernel's name for a record, with the winner's tile. kernel: name before the choice."""
    match = re.fullmatch(r"(.*?)((?: \(|; ).*)?", kernel, re.DOTALL)
    assert match is not None
    before, remark = match.groups(default="")
    if isinstance(winner, TritonTemplateCaller):
        name = re.sub(r"_\d+$", "", winner.name)
        parts = name.removeprefix("triton_") if name.startswith("triton_mx_") else name, _config(winner)
        return " ".join(filter(None, parts)) + remark
    if not isinstance(winner, ExternKernelCaller):
        return re.sub(r"_\d+$", "", winner.name) + remark
    if before.startswith("aten."):
        return kernel  # it names the library's kernel
    return _CALLS.get(winner.choice.name, str(winner.choice.call_name()))


def _config(choice: TritonTemplateCaller) -> str:
    """Returns the name of a choice's configuration: its tile, in elements of the product.

    Inductor keeps the template's arguments as text, in the choice's description.
    """
    if choice.make_kernel_render in _CONFIGS:
        return _CONFIGS[choice.make_kernel_render]
    settings = dict(re.findall(r"(\w+)=([^,]*)", choice.description))
    m, n, bytes_ = (settings.get(f"BLOCK_{side}", "") for side in "MNK")
    if not (m and n and bytes_):
        return ""
    elem = ELEMENTS.get(settings.get("ELEM_A", "").strip("'\""))
    k = int(bytes_) * (1 if elem is None else elem.per_byte)
    return f"{n}x{m}x{k} swapped" if settings.get("SWAP") == "True" else f"{m}x{n}x{k}"
