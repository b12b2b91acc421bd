"""The result of `codegen`: code and figures, as data, a table and files."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxcompile.offline.binary import Binary
from mxcompile.offline.estimate import Estimate
from mxcompile.offline.launch import INDISTINGUISHABLE, KINDS, Kernel, Launch, Step
from mxcompile.offline.rates import Rates
from mxcompile.report import Report
from mxcompile.report.forms.tables import drawn


@dataclass(frozen=True, kw_only=True, slots=True)
class CodegenResult:
    """The code that would run on a GPU. `codegen` returns it; ``print`` shows a table of its kernels.

    Attributes:
        target: GPU for which the code is generated.
        launches: Launches of one step, in order.
        kernels: Generated kernels, each once per phase.
        wrappers: Python module that launches the kernels, by phase.
        report: Report of the compile, with estimates for each GEMM and for the step.
        rates: Rates behind the estimates of the launches.
    """

    target: str
    launches: tuple[Launch, ...]
    kernels: tuple[Kernel, ...]
    wrappers: Mapping[str, str]
    report: Report
    rates: Rates

    def kernel(self, launch: Launch) -> Kernel:
        """Returns the generated kernel that `launch` runs.

        Raises:
            KeyError: It is a library kernel.
        """
        for kernel in self.kernels:
            if (kernel.phase, kernel.name) == (launch.phase, launch.kernel):
                return kernel
        raise KeyError(f"{launch.kernel} is not a generated kernel")

    def phase(self, name: str) -> tuple[Launch, ...]:
        """Returns the launches of the phase `name`."""
        return tuple(launch for launch in self.launches if launch.phase == name)

    @property
    def step(self) -> Step:
        """Sum of the estimates of all launches."""
        return Step.from_launches(self.launches, self.rates)

    @property
    def problems(self) -> tuple[str, ...]:
        """Reasons why kernels cannot run on the target; normally empty."""
        return tuple(f"{k.phase} {k.name}: {problem}" for k in self.kernels for problem in k.binary.problems)

    @property
    def spilling(self) -> tuple[Kernel, ...]:
        """Kernels whose threads spill registers to memory."""
        return tuple(kernel for kernel in self.kernels if kernel.binary.spill_bytes)

    def __str__(self) -> str:
        lines = [f"code for {self.target}, generated and compiled without it"]
        for phase in self.wrappers:
            launches = self.phase(phase)
            lines += ["", f"{phase}: {_totals(launches)}", _table(self, launches)]
        return "\n".join([*lines, "", *_summary(self)])

    def save(self, folder: str | Path) -> None:
        """Writes wrappers, kernels, assembly, binaries and a summary.

        ``summary.txt`` is ``str(result)``, ``summary.json`` has launches and figures, ``report.json`` the
        report.

        Args:
            folder: Target folder; it is created if it does not exist.
        """
        folder = Path(folder)
        for phase in self.wrappers:
            (folder / phase).mkdir(parents=True, exist_ok=True)
        (folder / "summary.txt").write_text(f"{self}\n", encoding="utf-8")
        (folder / "summary.json").write_text(json.dumps(_as_data(self), indent=1), encoding="utf-8")
        self.report.save(folder / "report.json")
        for phase, source in self.wrappers.items():
            (folder / f"{phase}.py").write_text(source, encoding="utf-8")
        for kernel in self.kernels:
            path = folder / kernel.phase / kernel.name
            path.with_suffix(".py").write_text(kernel.source, encoding="utf-8")
            for suffix, text in kernel.binary.text.items():
                path.with_suffix(f".{suffix}").write_text(text, encoding="utf-8")
            for suffix, image in kernel.binary.image.items():
                path.with_suffix(f".{suffix}").write_bytes(image)


def _as_data(result: CodegenResult) -> dict[str, Any]:
    step = result.step
    names = ("us", "by_kind", "by_reason", "num_bytes", "cast_memory_us", "launches", "unclear", "cast_ratio")
    figures = ("registers", "spill_bytes", "shared_bytes", "tmem_columns", "mma", "problems")
    return {
        "schema": 1,
        "target": result.target,
        "launches": [
            dataclasses.asdict(launch) | {"kind": launch.kind, "estimate": _estimate_as_data(launch.estimate)}
            for launch in result.launches
        ],
        "step": {name: getattr(step, name) for name in names} | {"range_us": dataclasses.asdict(step.range)},
        "kernels": [
            {
                "phase": kernel.phase,
                "name": kernel.name,
                "config": kernel.binary.config,
                "configs": kernel.binary.num_configs,
                **{name: getattr(kernel.binary, name) for name in figures},
            }
            for kernel in result.kernels
        ],
        "estimate_us": result.report.summary.estimate_us,
        "estimate_bf16_us": result.report.summary.estimate_bf16_us,
    }


def _estimate_as_data(estimate: Estimate | None) -> dict[str, Any] | None:
    if estimate is None:
        return None
    return {"us": estimate.us, "by": estimate.by, **dataclasses.asdict(estimate)}


def _totals(launches: Sequence[Launch]) -> str:
    generated = sum(launch.generated for launch in launches)
    moved = sum(launch.num_bytes for launch in launches) / 1e6
    casts = Counter(launch.cast for launch in launches if launch.cast)
    alone = ", ".join(f"{count} of {_ORIGINS[kind]}" for kind, count in sorted(casts.items()))
    return (
        f"{len(launches)} launches, {generated} generated, {moved:,.1f} MB moved\n"
        f"separate casts: {alone or 'none'}"
    )


_ORIGINS = {"input": "inputs and weights", "library": "library results", "generated": "generated results"}


def _table(result: CodegenResult, launches: Sequence[Launch]) -> str:
    """Returns a row for each kernel, in the order of first launches."""
    phases = {launch.phase for launch in launches}
    binaries = {kernel.name: kernel.binary for kernel in result.kernels if kernel.phase in phases}
    rows = []
    for kernel in dict.fromkeys(launch.kernel for launch in launches):
        same = [launch for launch in launches if launch.kernel == kernel]
        binary = binaries.get(kernel, Binary())
        rows.append(
            [
                _short(kernel, 22),
                str(len(same)),
                _short(_computed(same), 21),
                f"{sum(launch.num_bytes for launch in same) / 1e6:.1f}",
                *_estimates(same, result.rates),
                _short(_instruction(binary), 12),
                str(binary.registers or ""),
                f"{binary.shared_bytes / 1024:.0f}" if kernel in binaries else "",
            ]
        )
    headers = ["kernel", "×", "computes", "MB", "µs ≈", "by", "MMA", "regs", "KiB"]
    return drawn([headers, *rows], colalign=("left", "right", "left", "right", "right"))


def _estimates(launches: Sequence[Launch], rates: Rates) -> tuple[str, str]:
    """Returns the sum of the launches' estimates with its range, and the longest launch's largest part."""
    estimates = [launch.estimate for launch in launches if launch.estimate is not None]
    if not estimates:
        return "", ""
    us = Step.from_launches(launches, rates).range.text(",.0f")
    return us, max(estimates, key=lambda estimate: estimate.us).by


def _computed(launches: Sequence[Launch]) -> str:
    """Returns the GEMMs of some launches, shortened; without GEMMs, the source of their casts."""
    paths = [gemm.split(".") for launch in launches for gemm in launch.gemms]  # the last part has the GEMM
    if gemms := list(dict.fromkeys(".".join(path[-2:]) for path in paths)):
        return gemms[0] if len(gemms) == 1 else f"{gemms[0]} +{len(gemms) - 1}"
    kinds = {launch.cast for launch in launches}
    return f"cast of {_ORIGINS[kinds.pop()]}" if len(kinds) == 1 and kinds != {""} else ""


def _instruction(binary: Binary) -> str:
    if any("block_scale" in name for name in binary.mma):
        return binary.mma[0].partition(".")[0] + " block_scale"
    return binary.mma[0] if binary.mma else ""


def _short(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[head + 1 - width :]}"


def _summary(result: CodegenResult) -> list[str]:
    lines = list(result.problems)
    figures = result.report.summary
    if figures.estimate_us and figures.estimate_bf16_us:
        lines.append(
            f"matrix products, estimate without machine code (not measured): {figures.estimate_us:,.0f} µs,"
            f" in BF16 {figures.estimate_bf16_us:,.0f} µs"
        )
    if result.step.launches:
        lines.append(str(result.step))
    lines += _slowest_others(result)
    lines.append(f"generated kernels: {len(result.kernels)}, of them {len(result.spilling)} spill registers")
    lines += [f"  {kernel.spill}" for kernel in result.spilling]
    return lines


_MOST_OF_REST = 3


def _slowest_others(result: CodegenResult) -> list[str]:
    """Returns lines with the slowest kernels that are neither product, cast nor attention."""
    times: Counter[str] = Counter()
    for launch in result.launches:
        if launch.kind == "rest" and launch.estimate is not None:
            fused = re.sub(r"^triton_\w+?_fused_|_\d+$", "", launch.kernel)
            times[_short(fused, 40)] += round(launch.estimate.us)
    most = [f"    {name} {us:,}" for name, us in times.most_common(_MOST_OF_REST)]
    return ["  most of the rest, µs:", *most] if most else []


def side_by_side(results: Mapping[str, CodegenResult]) -> str:
    """Returns a table with a column per policy: estimates by kind, ratio to the last, bytes, launches."""
    steps = {name: result.step for name, result in results.items()}
    last = list(steps.values())[-1]
    rows: list[list[str]] = [
        [f"{kind}, µs", *(f"{step.by_kind.get(kind, 0.0):,.0f}" for step in steps.values())] for kind in KINDS
    ]
    rows.append(["step, µs", *(step.range.text(",.0f") for step in steps.values())])
    ratios = {name: step.over(last) for name, step in steps.items() if last.us}
    rows.append(["of the last", *(ratios[name].text(".2f") if name in ratios else "" for name in steps)])
    rows.append(["MB", *(f"{step.num_bytes / 1e6:,.0f}" for step in steps.values())])
    rows.append(["launches", *(str(step.launches) for step in steps.values())])
    target = next(iter(results.values())).target
    title = f"estimates on {target} from the machine code, not measured"
    compared = drawn([["", *steps], *rows], stralign="right")
    return "\n".join([title, compared, *_indistinguishable(steps)])


def _indistinguishable(steps: Mapping[str, Step]) -> list[str]:
    """Returns a sentence for each pair of policies whose order the estimates leave open."""
    pairs = itertools.combinations((name for name, step in steps.items() if step.us), 2)
    return [
        f"{first} and {second}: {INDISTINGUISHABLE}"
        for first, second in pairs
        if (ratio := steps[first].over(steps[second])).low <= 1.0 <= ratio.high
    ]
