"""A report held against what is known of the architecture: the misfits, folded over repeated layers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from animal import QUANTIZED, Animal, Expectation, expectation
from eager_run import EagerRun
from torch import nn

from mxcompile import Report
from mxcompile.report import GemmRecord

WEIGHT = ("", ".weight", "_weight")
SMALLEST = 32
"""The presets leave a matrix alone that has a shorter side; in the zoo some have, being small."""
ATTENTION = frozenset({"attn_scores", "attn_values"})


@dataclass(frozen=True, order=True, kw_only=True, slots=True)
class Misfit:
    """One thing that is not as expected. layer: its path, positions folded to N. problem: the difference."""

    layer: str
    problem: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.problem}"


def fold(name: str) -> str:
    """``layers.0.fc1`` → ``layers.N.fc1``."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "N", name)


def roles_of(report: Report, old_names: Callable[[str], str]) -> dict[str, list[GemmRecord]]:
    """Layer → its records, under the names of the plain model."""
    layers: defaultdict[str, list[GemmRecord]] = defaultdict(list)
    for gemm in report.gemms:
        layers[old_names(gemm.name)].append(gemm)
    return layers


_CONVOLUTION = Expectation.from_words(".*", "bf16")
"""What a convolution is of which no table speaks: an embedding of patches, or nothing in particular."""


def misfits(
    animal: Animal, model: nn.Module, report: Report, old_names: Mapping[str, str], run: EagerRun | None
) -> set[Misfit]:
    """All that is wrong with `report` of `model`. run: what a plain eager run saw, if one was made."""
    layers = roles_of(report, lambda name: _plain_name(name, old_names))
    faults = set(_wrong_roles(animal, layers, _convolutions(model, old_names)))
    faults |= {_misfit(name, "no such layer in the model") for name in layers if not _exists(name, old_names)}
    if run is not None:
        faults |= {
            _misfit(name, "no record") for name in run.layers if name not in layers and not dead(animal, name)
        }
        faults |= set(_wrong_flops(animal, report, run))
    return faults


def _misfit(name: str, problem: str) -> Misfit:
    return Misfit(layer=fold(name), problem=problem)


def _plain_name(name: str, old_names: Mapping[str, str]) -> str:
    """`name` under its old names. A layer is called by its weight without that word, where it has it."""
    old = next((old_names[name + suffix] for suffix in WEIGHT if name + suffix in old_names), name)
    return old.removesuffix("weight").rstrip("._")


def _exists(name: str, old_names: Mapping[str, str]) -> bool:
    names = set(old_names.values())
    return any(name + suffix in names for suffix in WEIGHT)


def dead(animal: Animal, name: str) -> bool:
    """Whether nothing reads the result of the layer `name`: a compiler drops it."""
    return bool(animal.dead) and re.fullmatch(rf"(?:.*\.)?(?:{animal.dead})", name) is not None


def _convolutions(model: nn.Module, old_names: Mapping[str, str]) -> frozenset[str]:
    """The convolutions of `model` that see more than one position."""
    return frozenset(
        old_names[name]
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.conv._ConvNd) and set(module.kernel_size) != {1}
    )


def _wrong_roles(
    animal: Animal, layers: Mapping[str, list[GemmRecord]], convolutions: frozenset[str]
) -> Iterator[Misfit]:
    """Roles and precisions that are not as expected, and expectations of what is not there."""
    expected = animal.expectations
    used: set[Expectation] = set()
    for name, records in layers.items():
        ours = expectation(name, expected) or (_CONVOLUTION if name in convolutions else None)
        roles = {gemm.role for gemm in records}
        if ours is None:
            yield from (_misfit(name, role) for role in roles - ATTENTION)
            continue
        used.add(ours)
        yield from (_misfit(name, role) for role in roles - ours.roles - ATTENTION)
        if ours.all_of:
            yield from (_misfit(name, f"nothing is {role}") for role in ours.roles - roles)
        elif not roles - ATTENTION and not ours.roles & ATTENTION:
            yield from (_misfit(name, role) for role in roles)
        for gemm in records:
            wanted = gemm.role in QUANTIZED and min(gemm.n, gemm.k) >= SMALLEST
            if gemm.gemm == "fprop" and (gemm.precision == "mxfp8") != wanted:
                yield _misfit(name, f"{gemm.role} in {gemm.precision}")
    for missing in (e for e in expected if e not in used and not e.optional):
        yield Misfit(layer=missing.pattern.pattern.removeprefix("(?:.*\\.)?"), problem="fits no layer")
    everywhere = {gemm.role for records in layers.values() for gemm in records}
    for role in {role for e in expected if e.optional and e.certain for role in e.roles} - everywhere:
        yield Misfit(layer="somewhere", problem=f"nothing is {role}")


def _wrong_flops(animal: Animal, report: Report, run: EagerRun) -> Iterator[Misfit]:
    """Whether the forward's products are all counted."""
    counted = sum(gemm.flops for gemm in report.gemms if gemm.gemm == "fprop")
    expected = run.flops - sum(flops for name, flops in run.layers.items() if dead(animal, name))
    if abs(counted - expected) > animal.flops_tolerance * expected:
        more = "fewer" if counted < expected else "more"
        yield Misfit(layer="FLOPs", problem=f"{more} counted than an eager run has")
