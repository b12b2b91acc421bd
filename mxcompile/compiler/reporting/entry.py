"""Publishes the report of each compiled graph, and updates it as kernels are chosen.

The hooks produce the report. When one of Inductor's caches hits, they do not run, and the report comes from
the store beside the cache.

    compile ─▶ report stored? yes: its token ─▶ key of Inductor's caches ─▶ hit: the stored report, or miss
                              no: a new token ─▶ key of Inductor's caches ─▶ miss, always

The cache keys contain a token from the stored report: cached code always has its report, and a graph without
a report is compiled again. The file name of a report is a hash of everything that it depends on (see
`Compilation.identity`), so a stored report equals a fresh one. The files are JSON; a damaged file counts as
missing.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import uuid
from collections import Counter
from pathlib import Path

import torch
from torch._guards import CompileContext
from torch._inductor.runtime.cache_dir_utils import cache_dir

from mxcompile.compiler.hooks.compilation import Compilation
from mxcompile.compiler.reporting import sharing, unplanned
from mxcompile.compiler.reporting.checks import check_ran
from mxcompile.compiler.reporting.shared_code import Attribution, attribution
from mxcompile.compiler.session.frames import is_running
from mxcompile.compiler.session.session import Places, session_of
from mxcompile.errors import UnsupportedError
from mxcompile.formats import is_quantized, labels
from mxcompile.graph.printer import add_artifact
from mxcompile.publish import publish as write
from mxcompile.report import REGISTRY, GemmRecord, Part
from mxcompile.report.data import schema
from mxcompile.report.data.record import flop_share
from mxcompile.report.forms.words import count, length
from mxcompile.rules import check_layers, layers_of
from mxcompile.watch.steps import in_backward

log = logging.getLogger(__name__)
report_log = logging.getLogger("mxcompile.report")


def stored_part(compilation: Compilation) -> Part | None:
    """Returns the stored part of the graph of `compilation` before it is compiled, or None.

    Restricts hits in Inductor's caches to the code that this part describes.
    """
    if compilation.capture.backward:
        compilation.use_code_of(compilation.owners)
        return None
    stored = load(compilation.identity)
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
    entry, path = _Entry(compilation), compilation.capture.module or "the model"
    if stored is not None:
        compilation.complete(stored)
    elif not compilation.traced:
        message = (
            f"Inductor ran no pass of mxcompile over a graph of {path}: its GEMMs are neither quantized nor"
            " listed; look for a setting of torch._inductor.config that turns passes off"
        )
        if compilation.options.strict:
            raise UnsupportedError(f"strict: {message}")
        warnings = (*compilation.part.warnings, message)
        compilation.part = dataclasses.replace(compilation.part, warnings=warnings)
    entry.put()
    part = compilation.part
    unplanned.check_function(compilation.capture, compilation.options, part, entry.ledger.frame)
    for warning in part.warnings:
        log.warning("%s", warning)
    kept = Counter(gemm.reason for gemm in part.gemms if not is_quantized(gemm.precision))
    skipped = ", ".join(f"{number} by {reason}" for reason, number in kept.most_common())
    log.info(
        "%s",
        f"compiled {path} for {compilation.target.name}, {compilation.options.policy.label}:"
        f" {flop_share(part.gemms):.1%} of matmul FLOPs in {labels(gemm.precision for gemm in part.gemms)}"
        f" ({len(part.gemms) - kept.total()} of {count(len(part.gemms), 'GEMM')}),"
        f" {count(part.casts, 'cast')}, left as they are: {skipped or 'none'}; Inductor cache {part.cache}",
    )
    if report_log.isEnabledFor(logging.DEBUG):
        for gemm in part.gemms:
            report_log.debug("%s", _line(gemm))
    add_artifact("mxcompile_report", lambda: "\n".join(map(_line, part.gemms)))
    compilation.changed = entry.publish_kernels
    if compilation.capture.planned.plan is None and not (entry.is_broken or compilation.capture.prefix):
        layers = layers_of(REGISTRY.layers(entry.ledger.group))
        check_layers(compilation.options.policy, layers, strict=compilation.options.strict)
    return attribution(compilation.capture, entry.places)


def _line(gemm: GemmRecord) -> str:
    """Returns the line about `gemm` in torch's structured trace, and in the log ``mxcompile.report``."""
    sizes = "x".join(map(length, (gemm.m, gemm.n, gemm.k)))
    return (
        f"{gemm.name} {gemm.gemm} [{gemm.role}] {sizes} {gemm.precision} {gemm.kernel or '-'}: {gemm.reason}"
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
            save(compilation.identity, part)

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
        capture, options = self._compilation.capture, self._compilation.options
        plan, root = capture.planned.plan, capture.root
        if plan is not None and root is not None and not is_running(root):  # a backward, after its call
            check_ran(root, options, plan)


def _path(name: str) -> Path:
    return Path(cache_dir()) / "mxcompile" / f"{name}.json"


def save(name: str, part: Part) -> None:
    """Stores `part` under `name`. Logs a warning if the directory is not writable."""
    try:
        write(_path(name), json.dumps(dataclasses.asdict(part)))
    except OSError as error:
        log.warning(
            "cannot store the report beside Inductor's cache, so a later process compiles again: %s", error
        )


def load(name: str) -> Part | None:
    """Returns the part stored under `name`, or None."""
    try:
        return schema.read(Part, schema.parse(_path(name).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("stored report %s is not readable, so the graph is compiled again: %s", name, error)
        return None
