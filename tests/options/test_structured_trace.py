"""What tlparse shows of a compile: graphs before and after the passes, and a line for each GEMM."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from helpers.eager_backend import EagerBackend
from torch import nn
from torch._logging._internal import trace_log


class Kept(logging.Handler):
    """The artifacts of mxcompile, by name."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.artifacts: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        name = getattr(record, "metadata", {}).get("artifact", {}).get("name", "")
        if name.startswith("mxcompile"):
            self.artifacts[name] = record.payload  # type: ignore[attr-defined]


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler = Kept()
    level = trace_log.level
    trace_log.addHandler(handler)
    trace_log.setLevel(logging.DEBUG)
    yield handler
    trace_log.removeHandler(handler)
    trace_log.setLevel(level)


def test_structured_trace_has_graphs_and_report(kept: Kept, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, "mxcompile.report")
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    torch.compile(model, backend=EagerBackend(root=model))(torch.randn(40, 64)).sum().backward()
    assert {*kept.artifacts} == {"mxcompile_before_passes", "mxcompile_after_passes", "mxcompile_report"}
    assert "mx.matmul" in kept.artifacts["mxcompile_after_passes"]
    assert "mx.matmul" not in kept.artifacts["mxcompile_before_passes"]
    lines = kept.artifacts["mxcompile_report"].splitlines()
    assert [message for message in caplog.messages if message in lines] == lines
    assert [line.split(":")[0] for line in lines if line.startswith("2 wgrad")] == [
        "2 wgrad [ffn_out] 64x96x40 mxfp8 -"
    ]
