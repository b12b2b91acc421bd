"""The order of the passes; a verifier and a printer run after each pass.

``TORCH_LOGS="+mxcompile.passes"`` prints the graph after every pass.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

from torch import fx

from mxcompile.graph.printer import printed
from mxcompile.graph.tags import GemmTag
from mxcompile.models.blocks import Blocks
from mxcompile.models.names import GraphInput
from mxcompile.passes.apply_plan import ApplyPlan
from mxcompile.passes.bodies import Bodies
from mxcompile.passes.classify import Classify
from mxcompile.passes.decide import Decide
from mxcompile.passes.detach_scale_state import DetachScaleState
from mxcompile.passes.find import Find
from mxcompile.passes.gather import Gather
from mxcompile.passes.hint_expert_splits import HintExpertSplits
from mxcompile.passes.quantize_gemms import QuantizeGemms
from mxcompile.passes.restore import Restore
from mxcompile.passes.reuse import Reuse
from mxcompile.passes.save import Save
from mxcompile.passes.seed import Seed
from mxcompile.passes.share import Share
from mxcompile.passes.split import Split
from mxcompile.passes.unregistered import Unregistered
from mxcompile.passes.verify import verify
from mxcompile.policy import Policy

log = logging.getLogger(__name__)


class Pass(Protocol):
    """A rewrite of a graph, in place."""

    name: ClassVar[str]

    def apply(self, graph: fx.Graph) -> None:
        """Transforms `graph`, a valid graph, into a valid graph."""


def joint_passes(
    policy: Policy,
    *,
    strict: bool,
    inputs: tuple[GraphInput, ...],
    blocks: Blocks,
    cut: str,
    planned: Mapping[str, tuple[GemmTag, ...]],
    tapped: bool,
) -> tuple[Pass, ...]:
    """Returns the passes over a joint or inference graph, in order.

    inputs: inputs of the captured graph. blocks: repeated blocks of the model. cut: reason why the graph is
    only a part of a model, or "". planned: the GEMMs of the whole model by name, if the graph is a part.
    tapped: whether weights come with the state of delayed scales.
    """
    find = Find(inputs=inputs, blocks=blocks)
    classify = Classify(inputs=inputs, is_cut=bool(cut))
    return (
        DetachScaleState(),
        Split(),
        HintExpertSplits(),
        find,
        classify,
        Unregistered(find=find, classify=classify),
        Bodies(find=find, classify=classify),
        *((ApplyPlan(planned=planned),) if cut else ()),
        Decide(policy=policy, strict=strict, cut=cut),
        QuantizeGemms(tapped=tapped),
        Reuse(),
        Restore(),
        Share(),
        Gather(),
        Seed(),
        Save(),
    )


def run(passes: Sequence[Pass], graph: fx.Graph) -> None:
    """Applies `passes` to `graph` in order, and verifies it after each pass."""
    tagged = decided = False
    checked: dict[fx.Node, object] = {}
    for step in passes:
        step.apply(graph)
        tagged = tagged or isinstance(step, Find)
        decided = decided or isinstance(step, Decide)
        verify(graph, step.name, decided=decided, tagged=tagged, checked=checked)
        log.debug("after %s\n%s", step.name, printed(graph))
