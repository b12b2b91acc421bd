"""The lowering of one graph for one target, before Inductor takes over.

``TORCH_LOGS="+mxcompile.lowering"`` prints the graph after it.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._inductor import config

from mxcompile.graph.opsets import packet
from mxcompile.graph.printer import Printed
from mxcompile.graph.tags import set_tag, tags_of
from mxcompile.lowering.cpu import attention as attention  # registers the lowering of attention
from mxcompile.lowering.cpu import kernel
from mxcompile.lowering.graph.cached_attention import CachedAttention
from mxcompile.lowering.graph.expand import Expand
from mxcompile.lowering.graph.fp8_layouts import FP8Layouts
from mxcompile.lowering.graph.promote import Promote
from mxcompile.lowering.graph.vendor_fp8 import VendorFP8
from mxcompile.lowering.inductor import cached as cached  # those of cached casts
from mxcompile.lowering.inductor import casts as casts  # those of the other casts
from mxcompile.lowering.inductor import dequantized as dequantized  # and the one of weight-only products
from mxcompile.lowering.inductor import general as general  # and those of other formats
from mxcompile.lowering.inductor import vendor as vendor  # and Inductor's of the vendor's products
from mxcompile.lowering.targets import Target

log = logging.getLogger(__name__)

_EXACT = {"cpp.enable_unsafe_math_opt_flag": False, "cpp.enable_floating_point_contract_flag": "off"}
"""On CPUs loops round by additions and subtractions, which compilers could otherwise take out or fuse."""


def config_patches(
    target: Target, uuid: str, tell: Callable[[Mapping[int, str]], None], asked: Mapping[str, Any]
) -> dict[str, Any]:
    """What Inductor's configuration needs for `target`.

    uuid: of mxcompile's code, for Inductor's caches. tell: takes the kernels that Inductor chooses by timing,
    by the index of their GEMM. asked: settings for this compile alone.
    """
    if target.device == "cpu":
        for key, value in _EXACT.items():
            if asked.get(key, operator.attrgetter(key)(config)) != value:
                log.warning("config.%s is %r in what mxfp8 compiles: casts round by additions", key, value)
        return dict(_EXACT)
    if target.device != "cuda" or _obstacle():
        return {}
    from mxcompile.lowering.inductor.prologues import Prologues
    from mxcompile.lowering.inductor.winners import Winners

    patches: dict[str, Any] = {
        "_post_fusion_custom_pass": Winners(uuid, config._post_fusion_custom_pass, tell)
    }
    if target.arch is not None:
        patches["_pre_fusion_custom_pass"] = Prologues(uuid, config._pre_fusion_custom_pass)
    return patches


@functools.cache
def _obstacle() -> str:
    """Why the templates cannot be used with the installed torch and Triton; "" if they can.

    They build on parts of Inductor that are not public, and on Triton, which not every machine has.
    """
    try:
        from mxcompile.lowering.graph import collect, couple, fuse, native, pair, tile_scales  # noqa: F401
        from mxcompile.lowering.inductor import prologues, winners  # noqa: F401
        from mxcompile.lowering.templates import (  # noqa: F401
            casts,
            fp8_casts,
            fused_quantize_mm,
            operand_casts,
            scaled_grouped_mm,
            scaled_mm,
        )
    except (ImportError, AttributeError, TypeError) as error:
        log.warning("MX GEMMs are dequantized: no templates with torch %s: %s", torch.__version__, error)
        return f"no MX templates with torch {torch.__version__}: {error}"
    return ""


@functools.cache
def _weight_only_obstacle() -> str:
    """The same for the templates of what reads stored weights, keys and values."""
    try:
        from mxcompile.lowering.templates import cached_attention, weight_only  # noqa: F401
    except (ImportError, AttributeError, TypeError) as error:
        log.warning(
            "stored weights are dequantized: no templates with torch %s: %s", torch.__version__, error
        )
        return f"no template that reads what is stored with torch {torch.__version__}: {error}"
    return ""


def _reading_obstacle(target: Target) -> str:
    """Why no kernel of `target`, a CPU or a chip with Triton, can read what is stored; "" if some can."""
    if target.device == "cpu":
        return kernel.obstacle()
    return _weight_only_obstacle() if target.arch is not None else ""


def _weight_only(graph: fx.Graph, target: Target, device: torch.device) -> dict[fx.Node, str]:
    """Products of few rows on their kernel; or why those are not that it is for."""
    if target.native or (target.arch is None and target.device != "cpu"):
        return {}
    from mxcompile.lowering.graph.weight_only import WeightOnly

    chosen = WeightOnly(target=target, device=device.type)
    if obstacle := _reading_obstacle(target):
        return dict.fromkeys(chosen.products(graph), obstacle)
    chosen.apply(graph)
    return {}


def uncached(target: Target) -> str:
    """Why weights are cast in every call on `target`, whatever the policy says; "" if they need not be."""
    if target.device != "cpu":
        return f"no kernel for {target.name} keeps copies"
    if config.cpp_wrapper:
        return "copies are kept in Python, which config.cpp_wrapper is to do without"
    return kernel.obstacle()


def run_joint(graph: fx.Graph, target: Target, device: torch.device) -> None:
    """What has to be decided where forward and backward are one graph; then as `run`."""
    if not (target.native or target.fp8_tiles) or _obstacle():
        return
    from mxcompile.lowering.graph.tile_scales import TileScales

    TileScales(target=target, device=device.type).apply(graph)
    VendorFP8(target=target, device=device.type, transposes=True).apply(graph)
    graph.eliminate_dead_code()
    graph.lint()
    log.debug("%s", Printed(graph, f"joint lowering for {target.name}"))


def run(graph: fx.Graph, target: Target, device: torch.device, *, promotes: bool = True) -> None:
    """Make the mx GEMMs of `graph` what `target` runs, and name the kernel of every GEMM in its tag.

    device: where the tensors of the graph are that stand for the target's; a graph may have others.
    promotes: whether products that stay in a dtype that `target` multiplies slowly run in FP32 although
    nothing in the graph is quantized.
    """
    obstacle = _obstacle() if target.native else ""
    if target.native and not obstacle:
        from mxcompile.lowering.graph.as_mx import AsMX
        from mxcompile.lowering.graph.couple import Couple
        from mxcompile.lowering.graph.fuse import Fuse
        from mxcompile.lowering.graph.native import Native
        from mxcompile.lowering.graph.pair import Pair
        from mxcompile.lowering.kernels import packed

        AsMX(target=target, device=device.type).apply(graph)
        Native(target=target, device=device.type).apply(graph)
        Fuse(target=target).apply(graph)
        Pair().apply(graph)
        if packed.available(target):
            Couple().apply(graph)
    told = CachedAttention(target=target, obstacle=_reading_obstacle(target)).apply(graph)
    reasons = _weight_only(graph, target, device)
    written = bool(target.fp8_tiles) and not _obstacle()
    reasons |= VendorFP8(target=target, device=device.type, transposes=written).apply(graph)
    if written:
        FP8Layouts().apply(graph)
    Expand(target=target, reasons=reasons).apply(graph)
    Promote(target=target, always=promotes).apply(graph)
    if target.emulates and not _obstacle():
        from mxcompile.lowering.graph.collect import Collect
        from mxcompile.lowering.graph.couple import Couple

        Collect(target=target, device=device.type).apply(graph)
        Couple().apply(graph)
    for node in graph.nodes:
        tags = tags_of(node)
        if tags and not tags[0].kernel:
            kernel_of = "; ".join(filter(None, (str(packet(node)), told.get(node))))
            set_tag(node, *(replace(tag, kernel=kernel_of) for tag in tags))
        elif obstacle and tags and tags[0].formats is not None:
            set_tag(node, *(replace(tag, kernel=f"{tag.kernel}; {obstacle}") for tag in tags))
    graph.lint()
    log.debug("%s", Printed(graph, f"lowering for {target.name}"))
