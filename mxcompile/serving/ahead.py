"""AOTInductor's configuration for models with stored weights: GEMMs with few rows read qdata.

    torch.export.export(model, …) ─▶ aoti_compile_and_package(program, inductor_configs=aoti_configs())

An exported program has qdata and scales as constants, and ``mx.decode`` between them and its GEMMs. Without
this configuration, every GEMM reads weights that were dequantized before it in the same call. With it, the
lowering chooses a kernel for each GEMM, as ``backend="mxfp8"`` does with the policy ``bf16``; the results
stay the same, unless activations are quantized too. There is no report.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._inductor import config

from mxcompile.compiler.hooks.inductor import GraphPass, sources_hash
from mxcompile.graph.opsets import aten, packet
from mxcompile.graph.shapes import operands
from mxcompile.graph.tags import GemmTag, Kind, set_tag, tags_of, tensor
from mxcompile.graph.transpose import untransposed
from mxcompile.lowering import targets
from mxcompile.lowering.cpu.features import features
from mxcompile.lowering.graph import pipeline as lowering
from mxcompile.ops.view import Dequantize
from mxcompile.passes.quantize_gemms import QuantizeGemms
from mxcompile.passes.reuse import Reuse
from mxcompile.passes.share import Share
from mxcompile.policy import Gemm

log = logging.getLogger(__name__)


def aoti_configs(target: str = "auto", *, quantize_activations: bool = False) -> dict[str, Any]:
    """Returns the ``inductor_configs`` for ``torch._inductor.aoti_compile_and_package``.

    A custom pass that is already configured in Inductor runs first.

    Args:
        target: As for ``torch.compile``.
        quantize_activations: Whether GEMMs with a stored weight cast their activations to its format.

    Returns:
        Inductor configuration: ``post_grad_custom_pre_pass``, and the flags of the C++ compiler that
        ``backend="mxfp8"`` sets too.

    Raises:
        TargetError: The target is unknown.

    Examples:
        >>> program = torch.export.export(model, inputs)
        >>> torch._inductor.aoti_compile_and_package(program, inductor_configs=aoti_configs())
    """
    targets.check(target)
    uuid = (
        f"{sources_hash()} ahead of time {target} {features().name} {features().no_integers}"
        f" {quantize_activations=}"
    )
    chosen = GraphPass(
        lambda graph: _lower(graph, target, quantize_activations), uuid, config.post_grad_custom_pre_pass
    )
    return {"post_grad_custom_pre_pass": chosen, **lowering.exact_settings({})}


def _lower(graph: fx.Graph, target: str, quantize_activations: bool) -> None:
    """Chooses kernels for the GEMMs of `graph`. Each GEMM counts as a layer."""
    device = torch.device("cpu")
    for node in graph.nodes:
        value = tensor(node)
        if packet(node) in (aten.mm, aten.addmm) and value is not None:
            device = value.device
            weight = untransposed(operands(node)[1])[0] if quantize_activations else None
            stored = None if weight is None else Dequantize.from_node(weight)
            tag = GemmTag(
                layer=node.name, name=node.name, module=str(packet(node)), source="", gemm=Gemm.FPROP,
                kind=Kind.LINEAR, tensors=("x", "w"),
                formats=None if stored is None else (replace(stored.form, packed=False),) * 2,
            )  # fmt: skip
            set_tag(node, tag)
    if quantize_activations:
        if not any(tag.formats for node in graph.nodes for tag in tags_of(node)):
            log.warning(
                "quantize_activations changes nothing in a program: it has no GEMM with a stored weight"
            )
        for step in (QuantizeGemms(), Reuse(), Share()):
            step.apply(graph)
    lowering.run(graph, targets.resolve(target, device), device, promotes=target == targets.CPU_FP32)
