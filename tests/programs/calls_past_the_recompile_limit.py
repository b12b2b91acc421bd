"""LayerDrop has more variants than Dynamo compiles: strict mode raises, else the report has the cause."""

import logging

import pytest
import torch
from shared import REFUSED, Dropped, compiled

import mxcompile

logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
model, x = Dropped().eval(), torch.randn(40, 64)


def run(call):
    with torch.no_grad():
        for bits in range(1, 16):
            call(x, tuple(bool(bits >> layer & 1) for layer in range(4)))


run(compiled(model, strict=False))
assert "recompile_limit" in "".join(map(str, mxcompile.reports())), "the limit is not in the report"
with pytest.raises(REFUSED, match="recompile_limit"):
    run(compiled(model))
