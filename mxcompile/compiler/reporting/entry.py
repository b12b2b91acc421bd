"""Publishes the report of each compiled graph, and updates it as kernels are chosen.

The hooks produce the report. When one of Inductor's caches hits, they do not run, and the report comes from
the store beside the cache (see `store`).
"""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections import Counter

import torch
from torch._guards import CompileContext

from mxcompile.compiler.hooks.compilation import Compilation
from mxcompile.compiler.hooks.structured_trace import trace_gemms
from mxcompile.compiler.reporting import sharing, store, unplanned
from mxcompile.compiler.reporting.checks import check_ran
from mxcompile.compiler.reporting.shared_code import Attribution, attribution
from mxcompile.compiler.session.publication import Places
from mxcompile.compiler.session.session import session_of
from mxcompile.errors import UnsupportedError
from mxcompile.formats import is_quantized, labels
from mxcompile.report import REGISTRY, Part
from mxcompile.report.data.record import flop_share
from mxcompile.report.forms.words import count
from mxcompile.rules import check_layers, layers_of
from mxcompile.watch.steps import in_backward

log = logging.getLogger(__name__)


def stored_part(compilation: Compilation) -> Part | None:
    """Returns the stored part of the graph of `compilation` before it is compiled, or None.

    Restricts hits in Inductor's caches to the code that this part describes (see `store`).
    """
    if compilation.capture.backward:
        compilation.use_code_of(compilation.owners)
        return None
    stored = store.load(compilation.identity)
    if stored is None or not stored.token:
        compilation.use_code_of(uuid.uuid4().hex)
        return None
    compilation.use_code_of(stored.token)
    return stored


def publish(compilation: Compilation, stored: Part | None) -> Attribution | None:
    """Completes and publishes the report of `compilation` after its code is compiled.

    stored: result of `stored_part`. Returns the attribution to further models that run the code, if
    needed. Raises `UnsupportedError` in strict mode if Inductor ran no hook.
    """
    if compilation.capture.backward:
        return None
    entry = _Entry(compilation)
    if stored is not None:
        compilation.complete(stored)
    elif not compilation.traced:
        _report_without_hooks(compilation)
    entry.put()
    unplanned.check_function(compilation.capture, compilation.options, compilation.part, entry.ledger.frame)
    for warning in compilation.part.warnings:
        log.warning("%s", warning)
    log.info("%s", _line(compilation))
    trace_gemms(compilation.part.gemms)
    compilation.changed = entry.publish_kernels
    if compilation.capture.planned.plan is None and not (entry.is_broken or compilation.capture.prefix):
        layers = layers_of(REGISTRY.layers(entry.ledger.group))
        check_layers(compilation.options.policy, layers, strict=compilation.options.strict)
    return attribution(compilation.capture, entry.places)


def _report_without_hooks(compilation: Compilation) -> None:
    """Adds a warning about a graph compiled without the hooks, or raises in strict mode."""
    path = compilation.capture.module or "the model"
    message = (
        f"Inductor ran no pass of mxcompile over a graph of {path}: its GEMMs are neither quantized nor"
        " listed; look for a setting of torch._inductor.config that turns passes off"
    )
    if compilation.options.strict:
        raise UnsupportedError(f"strict: {message}")
    compilation.part = dataclasses.replace(compilation.part, warnings=(*compilation.part.warnings, message))


def _line(compilation: Compilation) -> str:
    """Returns the log line about one graph, for ``TORCH_LOGS=mxcompile``."""
    part, label = compilation.part, compilation.options.policy.label
    words = labels(gemm.precision for gemm in part.gemms)
    kept = Counter(gemm.reason for gemm in part.gemms if not is_quantized(gemm.precision))
    skipped = ", ".join(f"{number} by {reason}" for reason, number in kept.most_common())
    return (
        f"compiled {compilation.capture.module or 'the model'} for {compilation.target.name}, {label}:"
        f" {flop_share(part.gemms):.1%} of matmul FLOPs in {words}"
        f" ({len(part.gemms) - kept.total()} of {count(len(part.gemms), 'GEMM')}),"
        f" {count(part.casts, 'cast')}, left as they are: {skipped or 'none'}; Inductor cache {part.cache}"
    )


class _Entry:
    """The registry entry of one compile."""

    def __init__(self, compilation: Compilation) -> None:
        self._compilation = compilation
        options, capture = compilation.options, compilation.capture
        key, plan = CompileContext.try_get() or object(), capture.planned.plan
        self.ledger = REGISTRY.open(key, options.ledger(compilation.target.name, capture.root))
        gemms = () if plan is None else plan.records(options.policy)
        self.places = Places(key, self.ledger, gemms, self._add_module)
        if capture.root is not None:
            session_of(capture.root).places.add(self.places)
        self.is_broken = bool(compilation.part.graph_breaks)
        self._twins = sharing.twins(capture, options.policy)

    def put(self) -> None:
        """Publishes the part in its present state, and stores it for cache hits."""
        compilation = self._compilation
        part = dataclasses.replace(compilation.part, prefix=compilation.capture.prefix, twins=self._twins)
        self.places.put(part)
        if compilation.lowered and part.token and part.cache != "off":
            store.save(compilation.identity, part)

    def _add_module(self, path: str) -> None:
        """Adds the module at `path`, which also runs the code, if no plan has listed the twins."""
        capture = self._compilation.capture
        if capture.planned.plan is None and path != capture.prefix:
            self._twins = (*self._twins, (path, capture.blocks.position(path)))
            unplanned.check(capture, self._compilation.options, path)
            self.put()

    def publish_kernels(self) -> None:
        """Publishes kernel names that arrive after the graph was published."""
        self.put()
        if in_backward():
            torch.autograd.Variable._execution_engine.queue_callback(REGISTRY.flush)
        check_ran(self._compilation)
