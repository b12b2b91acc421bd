"""What a compile leaves in the report: made known with the code, and again as kernels are chosen.

The hooks make it. When AOTAutograd's cache answers, no hook runs: the part then comes from the store beside
the cache (see `store`), and if it is gone from there, from tracing the graph again without compiling it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import fx, nn
from torch._guards import CompileContext

from mxcompile.compiler import sharing, store
from mxcompile.compiler.compilation import Compilation
from mxcompile.compiler.frames import is_running
from mxcompile.compiler.inductor import sources_hash
from mxcompile.compiler.options import Options
from mxcompile.compiler.plans import no_plan
from mxcompile.compiler.trace import trace
from mxcompile.errors import UnsupportedError
from mxcompile.formats import is_quantized, labels
from mxcompile.graph.tags import GemmTag, Kind
from mxcompile.plan.plan import Plan
from mxcompile.report import REGISTRY, Ledger
from mxcompile.report.forms.words import count
from mxcompile.report.record import flop_share
from mxcompile.rules import check_layers, complaints, layers_of, spelled

log = logging.getLogger(__name__)

_CHECKED: WeakKeyDictionary[nn.Module, dict[str, Plan | None]] = WeakKeyDictionary()
_RAN: WeakKeyDictionary[nn.Module, dict[str, Plan]] = WeakKeyDictionary()
"""By model and options, the plan that was held against: what the policy says, and what has run."""


def check_plan(compilation: Compilation, parts: Sequence[str] | None = None) -> None:
    """Hold the policy against the whole model, before any part of it is compiled, once for a policy.

    From then on every layer of the plan is in the report.

    parts: paths of all modules that will be compiled, if known. Raises what strict mode raises:
    `UnsupportedError` for layers that cannot go or are in no part, `PolicyError` for rules.
    """
    planned, root = compilation.found.planned, compilation.found.root
    if root is None:
        return
    plan, checked = planned.plan, _CHECKED.setdefault(root, {})
    if plan is None:
        if planned.missing and planned.missing not in checked:
            log.warning(no_plan(root, planned.missing))
            checked[planned.missing] = None
        return
    options = compilation.options
    if checked.get(options.fingerprint()) is plan:
        return
    outside = _outside(plan, options, parts) if parts is not None else []
    refused = [*_refused(plan, options), *outside] if options.strict else []
    for layer in outside if not options.strict else ():
        log.warning("%s; name a module that holds it in blocks=…", layer)
    layers = () if compilation.found.stage else plan.layers  # rules are for the layers of other stages too
    if refused:
        said = "strict: the policy sends these to MXFP8, but they cannot go there:\n  " + "\n  ".join(refused)
        raise UnsupportedError("\n".join([said, *(complaints(options.policy, layers) if layers else ())]))
    if layers:
        check_layers(options.policy, layers, strict=options.strict)
    checked[options.fingerprint()] = plan
    REGISTRY.plan(root, options.fingerprint(), plan.records(options.policy))


def check_ran(compilation: Compilation) -> None:
    """Hold what was compiled against the plan, once the call that it was made for is over.

    A backward that is lowered late tells: the forward has run then, and a layer without a record ran where
    Dynamo left Python to itself. Strict mode raises `UnsupportedError`, else there is a warning.
    """
    plan, root = compilation.found.planned.plan, compilation.found.root
    options = compilation.options
    if plan is None or root is None or is_running(root):
        return
    ran = _RAN.setdefault(root, {})
    if ran.get(options.fingerprint()) is plan:
        return
    ran[options.fingerprint()] = plan
    pending = REGISTRY.pending(root, options.fingerprint())
    names = [gemm.name for gemm in pending if is_quantized(gemm.precision)]
    if not names:
        return
    said = (
        f"{options.policy.label} quantizes these, but they ran outside of compiled code (see"
        f" TORCH_LOGS=graph_breaks): {spelled([layer for layer in plan.layers if layer.name in set(names)])}"
    )
    if options.strict:
        raise UnsupportedError(f"strict: {said}")
    log.warning("%s", said)


def _outside(plan: Plan, options: Options, parts: Sequence[str]) -> list[str]:
    """The layers of `plan` that the policy quantizes and no module in `parts` holds."""
    return [
        f"{tag.name}: not in a module that is compiled"
        for tag in _quantized(plan, options)
        if not any(tag.name == part or tag.name.startswith(f"{part}.") for part in parts)
    ]


def _refused(plan: Plan, options: Options) -> list[str]:
    """The layers of `plan` that the policy sends where they cannot go, with the reason."""
    sent = _quantized(plan, options)
    return [f"{tag.name}: {plan.obstacles[tag.name]}" for tag in sent if tag.name in plan.obstacles]


def _quantized(plan: Plan, options: Options) -> list[GemmTag]:
    """The layers of `plan` that the policy quantizes."""
    decide = options.policy.decide
    linear = (tag for tag in plan.tags if tag.kind is Kind.LINEAR)
    return [tag for tag in linear if decide(tag.as_layer()).fprop.formats is not None]


def publish(compilation: Compilation, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Complete the report of `compilation`, now that its code is at hand, and make it known."""
    if compilation.found.backward:
        return
    entry = _Entry(compilation)
    if not compilation.lowered and (compilation.part.gemms or not compilation.traced):
        entry.recall(gm, example_inputs)
    entry.put()
    log.info("%s", _line(compilation))
    compilation.changed = entry.hear
    if compilation.found.planned.plan is None and not (entry.is_broken or compilation.found.prefix):
        layers = layers_of(REGISTRY.layers(entry.ledger.group))
        check_layers(compilation.options.policy, layers, strict=compilation.options.strict)


def _line(compilation: Compilation) -> str:
    """What was made of one graph: for ``TORCH_LOGS=mxcompile``."""
    part, label = compilation.part, compilation.options.policy.label
    words = labels(gemm.precision for gemm in part.gemms)
    kept = Counter(gemm.reason for gemm in part.gemms if not is_quantized(gemm.precision))
    left = ", ".join(f"{number} by {reason}" for reason, number in kept.most_common())
    return (
        f"compiled {compilation.found.path or 'the model'} for {compilation.target.name}, {label}:"
        f" {flop_share(part.gemms):.1%} of matmul FLOPs in {words}"
        f" ({len(part.gemms) - kept.total()} of {count(len(part.gemms), 'GEMM')}),"
        f" {count(part.casts, 'cast')}, left as they are: {left or 'none'}; Inductor cache {part.cache}"
    )


class _Entry:
    """The place of one part in the registry."""

    def __init__(self, compilation: Compilation) -> None:
        self._compilation = compilation
        self._index: int | None = None
        options, found = compilation.options, compilation.found
        fresh = Ledger(
            target=compilation.target.name,
            policy=options.policy.label,
            path=options.report,
            group=options.fingerprint(),
            model=found.root,
        )
        self.ledger = REGISTRY.open(CompileContext.try_get() or object(), fresh)
        self.is_broken = bool(compilation.part.graph_breaks)
        self._twins = sharing.twins(found, options.policy)

    def recall(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        """Take the part from the store, or trace the graph again."""
        part = store.load(self._key())
        if part is None:
            log.info("no stored report for this graph: tracing it again")
            again = self._compilation.again(gm)
            trace(again, gm, example_inputs)
            part = again.part
            self._compilation.lowered = True
        self._compilation.part = dataclasses.replace(part, cache="hit")

    def put(self) -> None:
        """Make what is known so far known to the process."""
        compilation = self._compilation
        part = dataclasses.replace(compilation.part, prefix=compilation.found.prefix, twins=self._twins)
        self._index = REGISTRY.put(self.ledger, self._index, part)
        if compilation.lowered:
            store.save(self._key(), part)

    def hear(self) -> None:
        """Kernels have become known after the graph was published."""
        self.put()
        check_ran(self._compilation)

    def _key(self) -> str:
        compilation = self._compilation
        return store.key(
            sources_hash(),
            compilation.options.fingerprint(),
            compilation.target.name,
            compilation.found.with_sources,
        )
