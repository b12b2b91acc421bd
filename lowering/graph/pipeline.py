"""The lowering of one graph for one target, before Inductor takes over: its passes, in order.

``TORCH_LOGS="+mxcompile.lowering"`` prints the graph after every pass.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch._inductor import config

from mxcompile.graph import dead, sound
from mxcompile.graph.printer import printed
from mxcompile.graph.tags import add_fallback
from mxcompile.lowering import candidates, optional
from mxcompile.lowering.cpu import kernel
from mxcompile.lowering.graph.cached_attention import CachedAttention
from mxcompile.lowering.graph.expand import Expand
from mxcompile.lowering.graph.few_rows import FewRows
from mxcompile.lowering.graph.fuse import Fuse
from mxcompile.lowering.graph.integer import Integer
from mxcompile.lowering.graph.lowering_pass import LoweringPass
from mxcompile.lowering.graph.merge_casts import MergeCasts
from mxcompile.lowering.graph.merge_sibling_casts import MergeSiblingCasts
from mxcompile.lowering.graph.name_kernels import NameKernels
from mxcompile.lowering.graph.native import Native
from mxcompile.lowering.graph.packed import Packed
from mxcompile.lowering.graph.promote import Promote
from mxcompile.lowering.graph.promote_to_mx import PromoteToMX
from mxcompile.lowering.graph.split_casts import SplitCasts
from mxcompile.lowering.graph.tile_scales import TileScales
from mxcompile.lowering.graph.vendor_fp8 import JointVendorFP8, VendorFP8
from mxcompile.lowering.graph.weight_only import WeightOnly
from mxcompile.lowering.inductor import copies as copies  # registers casts
from mxcompile.lowering.inductor import fp_fusion
from mxcompile.lowering.inductor import hadamard as hadamard  # registers the transform
from mxcompile.lowering.inductor import statistics as statistics  # registers the statistics of a watch
from mxcompile.lowering.inductor import vendor as vendor  # replaces Inductor's lowering of aten._scaled_mm
from mxcompile.lowering.targets import Target

log = logging.getLogger(__name__)

candidates.register()

JOINT_LOWERING: tuple[type[LoweringPass], ...] = (TileScales, JointVendorFP8, Packed)
"""The passes over a graph that holds forward and backward. They run after `mxcompile.passes`."""

LOWERING: tuple[type[LoweringPass], ...] = (
    Packed,
    PromoteToMX,
    Native,
    Fuse,
    CachedAttention,
    Integer,
    FewRows,
    WeightOnly,
    VendorFP8,
    Expand,
    MergeCasts,
    SplitCasts,
    Promote,
    MergeSiblingCasts,
    NameKernels,
)
"""The passes over a forward, backward or inference graph. docs/architecture.md describes each of them.

Passes that choose kernels run before `Expand`, which takes the products that are left. Passes over casts run
after it, because it writes casts.
"""


def config_patches(
    target: Target, uuid: str, name_kernels: Callable[[Mapping[int, str]], None], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the settings of Inductor's configuration that `target` needs.

    Args:
        target: The chip.
        uuid: Hash of mxcompile's code, for Inductor's cache keys.
        name_kernels: Receives the kernels that Inductor chooses by timing, by index of their GEMM.
        options: Settings of this compile alone.
    """
    if target.device == "cpu":
        return exact_settings(options) | _regions(
            uuid, options, _setting("_post_fusion_custom_pass", options)
        )
    if target.arch is not None:
        fp_fusion.cache_fp8_types()
    if target.device != "cuda" or optional.obstacle("inductor.prologues", "inductor.winners"):
        return {}
    from mxcompile.lowering.inductor.prologues import Prologues
    from mxcompile.lowering.inductor.winners import Winners

    winners = Winners(uuid, _setting("_post_fusion_custom_pass", options), name_kernels)
    patches = {"_post_fusion_custom_pass": winners} | _regions(uuid, options, winners)
    if target.arch is not None:
        patches["_pre_fusion_custom_pass"] = Prologues(uuid, _setting("_pre_fusion_custom_pass", options))
    return patches


def exact_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `kernel.exact_settings`, and warns of each that changes `options` or Inductor's `config`."""
    settings = kernel.exact_settings()
    for key, value in settings.items():
        if _setting(key, options) not in (kernel.EXACT[key], value):
            log.warning(
                "mxfp8 sets config.%s to %r for its graphs, because their casts round by exact additions",
                key,
                value,
            )
    return settings


def _setting(key: str, options: Mapping[str, Any]) -> Any:
    """Returns the value of `key` in `options` (settings of this compile), or else in Inductor's `config`."""
    return options.get(key, operator.attrgetter(key)(config))


def _regions(uuid: str, options: Mapping[str, Any], others: Any) -> dict[str, Any]:
    """Returns the setting that names layers in traces, if Inductor marks its calls. others: prior passes."""
    if not _setting("profiler_mark_wrapper_call", options) or optional.obstacle("inductor.regions"):
        return {}
    from mxcompile.lowering.inductor.regions import Regions

    return {"_post_fusion_custom_pass": Regions(uuid, others)}


def obstacles(target: Target) -> list[str]:
    """Returns why passes for `target` cannot run here; [] if all can. Registers their templates."""
    steps = [step(target=target, device=target.device) for step in (*JOINT_LOWERING, *LOWERING)]
    reasons = (step.obstacle for step in steps if step.applies)
    return list(dict.fromkeys(filter(None, reasons)))


def run_joint(graph: fx.Graph, target: Target, device: torch.device) -> None:
    """Runs the passes that need forward and backward in one graph. Arguments and errors: as in `run`."""
    _apply(JOINT_LOWERING, graph, target, device)


def run(graph: fx.Graph, target: Target, device: torch.device, *, promotes: bool = True) -> None:
    """Rewrites the mx GEMMs of `graph` for `target`, and names the kernel of every GEMM in its tag.

    Args:
        graph: A forward, backward or inference graph, which the passes change in place.
        target: The chip.
        device: Device whose tensors count as tensors of the target. The graph may have tensors elsewhere too.
        promotes: Whether products in a dtype that `target` multiplies slowly run in FP32, although no
            product of the graph is quantized.

    Raises:
        VerificationError: A pass left an invalid graph.
    """
    _apply(LOWERING, graph, target, device, promotes)


def _apply(
    passes: Iterable[type[LoweringPass]],
    graph: fx.Graph,
    target: Target,
    device: torch.device,
    promotes: bool = False,
) -> None:
    """Applies the passes for `target`. If a pass cannot run here, tags of its candidates get the reason."""
    for lowering_pass in passes:
        step = lowering_pass(target=target, device=device.type, promotes=promotes)
        if not step.applies:
            continue
        obstacle = step.obstacle
        reasons = dict.fromkeys(step.candidates(graph), obstacle) if obstacle else step.apply(graph)
        for node, reason in (reasons or {}).items():
            add_fallback(node, reason)
        dead.eliminate(graph)
        sound.check(graph, step.name)
        log.debug("after %s for %s\n%s", step.name, target.name, printed(graph))
