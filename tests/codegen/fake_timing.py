"""Autotuning on a machine without the GPU: Inductor chooses as if it had timed, by times made up here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._inductor.scheduler import Scheduler
from torch._inductor.select_algorithm import AlgorithmSelectorCache, TritonTemplateCaller

from mxcompile.lowering.inductor.winners import BENCHMARKED
from mxcompile.offline import driver

Prefers = Callable[[str, dict[str, str]], bool]

_MOST_CHOICES = {
    "benchmark_template_fusion": "max_template_fusion_benchmarked_choices",
    "benchmark_epilogue_fusion": "max_epilogue_benchmarked_choices",
}
_ON = {"max_autotune_gemm": True, "autotune_in_subproc": False, _MOST_CHOICES[BENCHMARKED]: 99}


@contextmanager
def fastest(prefers: Prefers, behind: Prefers | None = None) -> Iterator[list[str]]:
    """While it lasts `codegen` autotunes, and what `prefers` holds for is the fastest of its kind.

    prefers: takes a choice's name and the constants of its template. behind: the same for templates with what
    is fused behind them, which have no name; what it does not hold for is not worth fusing. Yields the names
    of all that were timed alone.
    """
    seen: list[str] = []

    def timings(*arguments: Any, **_: Any) -> Any:
        choices = arguments[6]
        seen.extend(choice.name for choice in choices)
        return {choice: _time(prefers(choice.name, _constants(choice))) for choice in choices}

    def fused(_: Any, module: Any, device: Any) -> tuple[float, str]:
        source = Path(module.__file__).read_text(encoding="utf-8")
        constants = dict(re.findall(r"(\w+) : tl\.constexpr = ([\w.]+)", source))
        return _time((behind or prefers)("", constants), 2.0 if behind is None else 99.0), ""

    with (
        patch.dict(driver._CONFIG, _ON),
        patch.object(
            torch._C, "_cuda_getCurrentRawStream", int, create=True
        ),  # modules to be timed import it
        patch.object(AlgorithmSelectorCache, "do_autotuning", timings),
        patch.object(Scheduler, "benchmark_codegened_module", fused),
        patch.object(Scheduler, "benchmark_fused_nodes", lambda *_: (9.0, "")),
    ):
        yield seen


def _time(preferred: bool, other: float = 2.0) -> float:
    return 1.0 if preferred else other


def _constants(choice: Any) -> dict[str, str]:
    if not isinstance(choice, TritonTemplateCaller):
        return {}
    return dict(re.findall(r"(\w+)=([^,]*)", choice.description))
