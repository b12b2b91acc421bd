"""The lowering of one graph for one target, before Inductor takes over.

``TORCH_LOGS="+mxcompile.lowering"`` prints the graph after it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from torch import fx
from torch._inductor import config

from mxcompile.graph.opsets import packet
from mxcompile.graph.printer import Printed
from mxcompile.graph.tags import set_tag, tags_of
from mxcompile.lowering import casts as casts  # registers the lowerings of the casts
from mxcompile.lowering.expand import Expand
from mxcompile.lowering.native import Native
from mxcompile.lowering.pair import Pair
from mxcompile.lowering.prologues import Prologues
from mxcompile.lowering.targets import Target
from mxcompile.lowering.templates import casts as cast_templates  # noqa: F401  registers the templates
from mxcompile.lowering.templates import scaled_mm as scaled_mm  # registers the template

log = logging.getLogger(__name__)


def config_patches(target: Target, uuid: str) -> dict[str, Any]:
    """What Inductor's configuration needs for `target`. uuid: of mxcompile's code, for Inductor's caches."""
    if not target.native:
        return {}
    return {"_pre_fusion_custom_pass": Prologues(uuid, config._pre_fusion_custom_pass)}


def run(graph: fx.Graph, target: Target) -> None:
    """Make the mx GEMMs of `graph` what `target` runs, and name the kernel of every GEMM in its tag."""
    if target.native:
        Native(target=target).apply(graph)
        Pair().apply(graph)
    Expand().apply(graph)
    for node in graph.nodes:
        tags = tags_of(node)
        if tags and not tags[0].kernel:
            set_tag(node, *(replace(tag, kernel=str(packet(node))) for tag in tags))
    graph.lint()
    log.debug("%s", Printed(graph, f"lowering for {target.name}"))
