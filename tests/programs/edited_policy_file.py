"""A notebook edits its policy file and compiles a new model: the new policy decides."""

import tempfile
from pathlib import Path

import torch
from shared import Mlp
from torch import nn

import mxcompile

x, differs = torch.randn(40, 64), []
with tempfile.TemporaryDirectory() as folder, torch.no_grad():
    path = Path(folder, "policy.yaml")
    for preset in ("nvidia", "bf16"):
        path.write_text(f"version: 1\npreset: {preset}\n", encoding="utf-8")
        model = nn.Sequential(Mlp(), Mlp())
        y = torch.compile(model, backend="mxfp8", options={"policy": str(path)})(x)
        differs.append(not torch.allclose(y, model(x), atol=1e-5))
shares = [report.summary.flop_share for report in mxcompile.reports()]
assert (differs, shares) == ([True, False], [1, 0]), (differs, shares)
