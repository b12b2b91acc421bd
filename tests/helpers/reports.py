"""Reports of what the passes make of a call that is compiled alone, without Inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import mxcompile
from helpers.eager_backend import EagerBackend
from helpers.fresh import forget
from helpers.policies import every
from mxcompile.report import GemmRecord, Report

EVERYTHING = every("mxfp8")
"""The policy that quantizes every layer."""


def report_of(
    call: Callable[..., Any], *args: Any, training: bool = True, fullgraph: bool = True, **options: Any
) -> Report:
    """The one report of `call` under `options`: of a call, and of its backward if `training`."""
    forget()
    with torch.set_grad_enabled(training):
        result = torch.compile(call, backend=EagerBackend(**options), fullgraph=fullgraph)(*args)
    if training:
        result.float().sum().backward()
    (report,) = mxcompile.reports()
    return report


def all_gemms() -> list[GemmRecord]:
    """The records of all reports."""
    return [gemm for report in mxcompile.reports() for gemm in report.gemms]


def precisions() -> dict[str, set[str]]:
    """Precisions of the GEMMs of every layer in all reports."""
    by_name: dict[str, set[str]] = {}
    for gemm in all_gemms():
        by_name.setdefault(gemm.name, set()).add(gemm.precision)
    return by_name
