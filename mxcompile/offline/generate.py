"""`codegen`: the kernels that ``torch.compile(model, backend="mxfp8")`` would run on a GPU, without the GPU.

    driver    model → Inductor's modules for forward and backward
    wrapper   module → kernels and launches
    binary    kernel → assembly, binary, registers, spills, instructions
    kernel_work, estimate    launch → work → time and its largest part

Two things differ from a compile on the target machine. Nothing is timed: the lowest estimate selects one of
several configurations. And the model is traced on the CPU (see `device`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from mxcompile.compiler.rehearsal import apart
from mxcompile.compiler.session.options import Options
from mxcompile.errors import OptionError, TargetError
from mxcompile.graph.opsets import VIEWS
from mxcompile.lowering.targets import AUTO, TARGETS, Target, check, of_chip
from mxcompile.models.arguments import ModelInput
from mxcompile.offline import kernel_work
from mxcompile.offline.binary import Binary, cross_compile
from mxcompile.offline.device import attention_backend
from mxcompile.offline.driver import Driver, Generated
from mxcompile.offline.estimate import library_work
from mxcompile.offline.launch import CASTS, COLLECTIVE, Kernel, Launch
from mxcompile.offline.rates import Rates
from mxcompile.offline.record_work import WIDE, estimate
from mxcompile.offline.result import CodegenResult
from mxcompile.offline.standin import stand_in
from mxcompile.offline.wrapper import KernelCall, Module, read
from mxcompile.policy import Policy
from mxcompile.ranks.built import Factory, named_inputs, rank_model
from mxcompile.ranks.shape import PIPELINE, MeshShape
from mxcompile.report import Part, Report
from mxcompile.watch import Watch

_MOVES = frozenset(str(view) for view in VIEWS) | {"<built-in function getitem>", "aten.clone"}
_DOTS = ("tl.dot", "tile_product(", "weight_only.", "cached_attention.")
"""Substrings in the source of kernels that multiply matrices."""


def codegen(
    model: nn.Module | Factory,
    *args: Any,
    target: str = "sm_100",
    out_dir: str | Path | None = None,
    training: bool = True,
    policy: Policy | str | dict[str, Any] | None = None,
    rates: str | Path | None = None,
    attention: str = "auto",
    watch: Watch | None = None,
    mesh: str | None = None,
    parallel: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **inputs: ModelInput,
) -> CodegenResult:
    """Generates the code that a compile of `model` would run on `target`, without the GPU.

    Args:
        model: Model on any device, including meta; it is neither run nor changed. With `mesh`, possibly a
            factory as for `explain_rank`.
        *args: Positional arguments of the model's call (see `models.arguments`).
        target: A GPU of `lowering.targets.TARGETS`, or a chip such as "h100".
        out_dir: Folder in which to save the result.
        training: Whether to generate backward, too.
        policy: As the backend's option.
        rates: File of measured rates, which replace rows of the built-in table (see `rates`).
        attention: Backend of attention without a mask, "cudnn" or "flash"; "auto" is PyTorch's choice.
        watch: Watch whose sampled steps are generated, instead of ordinary steps.
        mesh: Mesh of ranks; the code is rank 0's, as in `explain_rank`.
        parallel: Parallelism of the mesh, as in `explain_rank`.
        kwargs: Keyword arguments of the model's call.
        **inputs: Further keyword arguments of the model's call.

    Returns:
        Launches, kernels, estimates and the report. A kernel that cannot run raises nothing; see `problems`.

    Raises:
        TargetError: `target` is unknown or not a GPU.
        PolicyError: `policy` is not valid.
        OptionError: Neither the model nor `codegen` takes a keyword, or an option is not valid.
        ModelError: The model cannot be traced.

    Examples:
        >>> result = mxcompile.codegen(model, input_ids=ids, target="sm_100", out_dir="code")
        >>> print(result)
    """
    named = named_inputs("codegen", locals())
    if parallel is not None and mesh is None:
        raise OptionError("`parallel` needs a mesh: give `mesh`, such as dp=128,tp=8")
    chip = None if check(target) == AUTO else of_chip(target)
    if chip is None or chip.arch is None:
        gpus = ", ".join(name for name, row in TARGETS.items() if row.arch is not None)
        raise TargetError(f"code is generated for a GPU, found target {target!r}; allowed: {gpus}")
    target = chip.name
    options = Options.parse(None, {"policy": policy, "target": target, "watch": watch})
    chip_rates = Rates.for_target(chip, rates)
    backend = attention_backend(chip, attention)
    driven = partial(_driven, model, args, named, mesh, parallel, options, training, backend)
    parts, generated = apart(driven)
    report = estimate(Report.from_parts(parts, target=target, policy=options.policy.label))
    wide = {f"{gemm.name} {gemm.gemm}" for gemm in report.gemms if gemm.dtype in WIDE}
    launches, kernels = _cross_compiled(generated, chip, chip_rates, wide)
    spills = tuple(kernel.spill for kernel in kernels if kernel.is_template and kernel.binary.spill_bytes)
    summary = dataclasses.replace(report.summary, warnings=report.summary.warnings + spills)
    result = CodegenResult(
        target=target,
        launches=tuple(launches),
        kernels=tuple(kernels),
        wrappers={phase: graph.source for phase, graph in _named(generated)},
        report=dataclasses.replace(report, summary=summary),
        rates=chip_rates,
    )
    if out_dir is not None:
        result.save(out_dir)
    return result


def _cross_compiled(
    generated: Sequence[Generated], chip: Target, rates: Rates, wide: Container[str]
) -> tuple[list[Launch], list[Kernel]]:
    """Returns the launches of the generated graphs, in order, and their kernels, each compiled once."""
    kernels: dict[tuple[str, str], Kernel] = {}
    launches: list[Launch] = []
    for phase, graph in _named(generated):
        module = read(graph.source, graph.input_bytes)
        for launch, call in zip(_launches(phase, module, graph), module.calls, strict=True):
            worker = _Worker(launch, call, module.kernels.get(call.kernel, ""), rates, wide)
            if call.generated and (phase, call.kernel) not in kernels:
                with stand_in(chip):
                    binary = cross_compile(call.kernel, worker.source, chip, worker.time)
                kernels[phase, call.kernel] = Kernel(
                    phase=phase, name=call.kernel, source=worker.source, binary=binary
                )
            launches.append(worker.launched(kernels.get((phase, call.kernel))))
    return launches, [*kernels.values()]


def _driven(
    model: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mesh: str | None,
    parallel: str | None,
    options: Options,
    training: bool,
    backend: str,
) -> tuple[list[Part], list[Generated]]:
    """Returns the report parts and the generated code of `model`, on rank 0 of `mesh` if given."""
    if mesh is None:
        driver = Driver(model, options, training, backend)
        driver.call(args, kwargs)
        return driver.parts, driver.generated
    shape = MeshShape.parse(mesh)
    if PIPELINE in shape.names:
        raise OptionError(
            f"code is generated for whole models, not for stages: leave the axis {PIPELINE} out of the mesh"
        )
    with rank_model(model, args, kwargs, shape, parallel) as here:
        driver = Driver(here.model, options, training, backend, here.groups)
        driver.call(here.args, here.kwargs)
        here.check(sends=any("_c10d_functional" in graph.source for graph in driver.generated))
        return driver.parts, driver.generated


_SCALES = {"(tensor": "fp8_tensor", "(channel": "fp8_channel", "(1x128": "fp8_block"}
"""Kinds of rates by the prefix of the scale granularity in the record of a library's FP8 product."""


@dataclass(frozen=True, slots=True)
class _Worker:
    """Estimates the time of one launch.

    source: Triton source of the kernel, "" for a library kernel. wide: GEMMs with a dtype wider than BF16.
    """

    launch: Launch
    call: KernelCall
    source: str
    rates: Rates
    wide: Container[str]

    def launched(self, kernel: Kernel | None) -> Launch:
        if self.rates.target.peak is None or self.launch.kind == COLLECTIVE:
            return self.launch
        facts = None if kernel is None else self._facts(kernel.binary)
        if facts is not None:
            work = facts.work
        else:
            moved, flops, target = self.launch.num_bytes, self.launch.flops, self.rates.target
            work = library_work(num_bytes=moved, flops=flops, product=self._product(), target=target)
        return dataclasses.replace(self.launch, facts=facts, work=work, estimate=work.estimate(self.rates))

    def time(self, binary: Binary) -> float:
        """Returns the estimate in µs for `binary`; 0 for a chip without known peaks."""
        has_peak = self.rates.target.peak is not None
        return self._facts(binary).work.estimate(self.rates).us if has_peak else 0.0

    def _facts(self, binary: Binary) -> kernel_work.Facts:
        return kernel_work.read(
            num_bytes=self.launch.num_bytes,
            flops=self.launch.flops,
            source=self.source,
            numbers=self.call.numbers,
            binary=binary,
            target=self.rates.target,
        )

    def _product(self) -> str:
        name = self.launch.kernel
        if self.launch.kind == "attention":
            backend = next((candidate for candidate in ("cudnn", "efficient") if candidate in name), "flash")
            return f"{backend}_backward" if "_backward" in name else backend
        if "mx_vendor" in name:
            return "fp4" if "fp4" in name else "mxfp8"
        if "scaled" in name:
            return next(
                (kind for begin, kind in _SCALES.items() if begin in self.launch.library), "fp8_tensor"
            )
        return "fp32" if any(gemm in self.wide for gemm in self.launch.gemms) else "bf16"


def _named(generated: Sequence[Generated]) -> list[tuple[str, Generated]]:
    """Returns the graphs by unique names: the phase, numbered if several graphs have it."""
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
        launched.update(products)  # a later kernel that sums a product's parts has it among its origins, too
        tags = [tag for node in products for tag in graph.gemms.get(node, ())]
        attention = sum(graph.attention_flops.get(node, 0.0) for node in products)
        only_casts = bool(computed) and CASTS.issuperset(computed)
        launches.append(
            Launch(
                phase=phase,
                kernel=call.kernel,
                generated=call.generated,
                gemms=tuple(dict.fromkeys(f"{tag.name} {tag.gemm}" for tag in tags)),
                operators=computed,
                cast=_source(call, written_by) if call.generated and only_casts else "",
                num_bytes=call.num_bytes,
                flops=attention or sum(tag.flops for tag in dict.fromkeys(tags)),
                library="" if call.generated else next((tag.kernel for tag in tags), ""),
            )
        )
        written_by |= dict.fromkeys(call.writes, "generated" if call.generated else "library")
    return launches


def _source(call: KernelCall, written_by: dict[str, str]) -> str:
    """Returns the kind of call that wrote the input of a cast (see `Launch`); "" without inputs."""
    kinds = {written_by.get(name, "input") for name in call.reads}
    return next((kind for kind in ("generated", "library", "input") if kind in kinds), "")


def _packet(overload: str) -> str:
    """``aten.view.default`` → ``aten.view``."""
    return overload.rpartition(".")[0] if overload.count(".") > 1 else overload
