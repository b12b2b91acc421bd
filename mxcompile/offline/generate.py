"""`codegen`: the kernels that ``torch.compile(model, backend="mxfp8")`` would run on a GPU, without the GPU.

    driver    model → the modules Inductor writes for forward and backward
    wrapper   module → kernels and launches
    binary    kernel → assembly, binary, registers, spills, instructions
    bounds    launch → how long it takes at least, and why

What differs from a compile on the machine itself: nothing is measured, so that where Inductor would time
several configurations the first is taken, and the model is traced on the CPU (see `device`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from mxcompile.analysis.explain.roofline import WIDE, estimate
from mxcompile.compiler.options import Options
from mxcompile.errors import TargetError
from mxcompile.graph.opsets import VIEWS
from mxcompile.lowering.targets import TARGETS, Target, check
from mxcompile.models.arguments import ModelInput, keywords
from mxcompile.offline import bounds
from mxcompile.offline.binary import cross_compile
from mxcompile.offline.bounds import Bound
from mxcompile.offline.driver import Driver, Generated
from mxcompile.offline.launch import Kernel, Launch
from mxcompile.offline.result import CodegenResult
from mxcompile.offline.standin import stand_in
from mxcompile.offline.wrapper import Call, Module, read
from mxcompile.ops import CASTS
from mxcompile.policy import Policy
from mxcompile.report import Report

_MOVES = frozenset(str(view) for view in VIEWS) | {"<built-in function getitem>", "aten.clone"}
_CASTS = frozenset(str(cast) for cast in CASTS)
_DOTS = (
    "tl.dot",
    "tile_product(",
    "weight_only.",
    "cached_attention.",
)  # what a kernel that multiplies matrices says, or calls


def codegen(
    model: nn.Module,
    *args: Any,
    target: str = "sm_100",
    out_dir: str | Path | None = None,
    training: bool = True,
    policy: Policy | str | dict[str, Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **inputs: ModelInput,
) -> CodegenResult:
    """What a compile of `model` would run on `target`.

    model: on any device, the meta device too; it is not run and not changed. args, inputs, kwargs: what it is
    called with (see `models.arguments`). target: a GPU of
    `lowering.targets.TARGETS`, which need not be here. out_dir: folder to write everything to. training:
    forward and backward, else forward only. policy: as the backend's option.

    Raises `TargetError`, `PolicyError`, `OptionError` for a keyword nobody takes, or `ModelError` if the
    model cannot be traced. A kernel that would not run is no error: see `CodegenResult.problems`.
    """
    given = {"target": target, "out_dir": out_dir, "training": training, "policy": policy}
    named = keywords("codegen", model, inputs, kwargs, given)
    target = check(target)
    chip = TARGETS.get(target)
    if chip is None or chip.arch is None:
        gpus = ", ".join(name for name, row in TARGETS.items() if row.arch is not None)
        raise TargetError(f"code is generated for a GPU, found target {target!r}: allowed are {gpus}")
    options = Options.parse(None, {"policy": policy, "target": target})
    driver = Driver(model, options, training)
    driver.call(args, named)
    written = [
        (phase, graph, read(graph.source, graph.input_bytes)) for phase, graph in _named(driver.generated)
    ]
    with stand_in(chip):
        kernels = {
            (phase, name): Kernel(
                phase=phase, name=name, source=source, binary=cross_compile(name, source, chip)
            )
            for phase, _, module in written
            for name, source in module.kernels.items()
        }
    launches = []
    report = Report.of(driver.parts, target=target, policy=options.policy.label)
    wide = {f"{gemm.name} {gemm.gemm}" for gemm in report.gemms if gemm.dtype in WIDE}
    for phase, graph, module in written:
        for launch, call in zip(_launches(phase, module, graph), module.calls, strict=True):
            bound = _bound(launch, call, kernels.get((phase, call.kernel)), chip, wide)
            launches.append(dataclasses.replace(launch, bound=bound))
    result = CodegenResult(
        target=target,
        launches=tuple(launches),
        kernels=tuple(kernels.values()),
        wrappers={phase: graph.source for phase, graph, _ in written},
        report=estimate(report),
    )
    if out_dir is not None:
        result.save(out_dir)
    return result


def _bound(
    launch: Launch, call: Call, kernel: Kernel | None, chip: Target, wide: Container[str]
) -> Bound | None:
    """The bound of `launch`. wide: the GEMMs of a dtype wider than BF16, as launches name them."""
    if chip.peak is None:
        return None
    if kernel is None:
        rate = chip.peak.bf16_tflops
        if "scaled" in launch.kernel:
            rate = chip.peak.fp8_tflops
        elif any(gemm in wide for gemm in launch.gemms):
            rate = chip.peak.fp32_tflops
        return bounds.of_library(num_bytes=launch.num_bytes, flops=launch.flops, tflops=rate, target=chip)
    return bounds.of_generated(
        num_bytes=launch.num_bytes,
        flops=launch.flops,
        source=kernel.source,
        numbers=call.numbers,
        binary=kernel.binary,
        target=chip,
    )


def _named(generated: Sequence[Generated]) -> list[tuple[str, Generated]]:
    """The graphs with a name each: the phase, numbered if there are several of it."""
    totals = Counter(graph.phase for graph in generated)
    seen: Counter[str] = Counter()
    named = []
    for graph in generated:
        number = f"_{seen[graph.phase]}" if totals[graph.phase] > 1 else ""
        seen[graph.phase] += 1
        named.append((graph.phase + number, graph))
    return named


def _launches(phase: str, module: Module, graph: Generated) -> list[Launch]:
    written_by: dict[str, str] = {}
    launched: set[str] = set()
    launches = []
    for call in module.calls:
        nodes = graph.origins.get(call.handle, ())
        operators = dict.fromkeys(graph.operators[node] for node in nodes if node in graph.operators)
        computed = tuple(name for name in operators if _packet(name) not in _MOVES)
        source = module.kernels.get(call.kernel, _DOTS[0])
        multiplies = any(dot in source for dot in _DOTS)
        products = [node for node in nodes if multiplies and node not in launched]
        launched.update(
            products
        )  # what reads a product's parts, to sum them, has it among its origins as well
        tags = [tag for node in products for tag in graph.gemms.get(node, ())]
        only_casts = bool(computed) and all(_packet(name) in _CASTS for name in computed)
        launches.append(
            Launch(
                phase=phase,
                kernel=call.kernel,
                generated=call.generated,
                gemms=tuple(dict.fromkeys(f"{tag.name} {tag.gemm}" for tag in tags)),
                operators=computed,
                cast=_source(call, written_by) if call.generated and only_casts else "",
                num_bytes=call.num_bytes,
                flops=sum(tag.flops for tag in dict.fromkeys(tags)),
            )
        )
        written_by |= dict.fromkeys(call.writes, "generated" if call.generated else "library")
    return launches


def _source(call: Call, written_by: dict[str, str]) -> str:
    """What made the tensors that a cast reads (see `Launch`)."""
    made = {written_by.get(name, "input") for name in call.reads}
    return next(kind for kind in ("generated", "library", "input") if kind in made)


def _packet(overload: str) -> str:
    """``aten.view.default`` → ``aten.view``."""
    return overload.rpartition(".")[0] if overload.count(".") > 1 else overload
