"""Equal blocks under nested_compile_region have the records, rules and results of plain blocks."""

import torch
from shared import EVERYTHING, Mlp, compiled, gemms, linears
from torch import nn


class Region(Mlp):
    forward = torch.compiler.nested_compile_region(Mlp.forward)


policy = {"version": 1, "rules": [{"match": {"name": "1.*"}, "use": "bf16"}, *EVERYTHING["rules"]]}
regions, plain = (nn.Sequential(*(kind() for _ in range(4))) for kind in (Region, Mlp))
plain.load_state_dict(regions.state_dict())
outputs, x = [], torch.randn(40, 64)
for model in (regions, plain):
    with torch.no_grad():
        outputs.append(compiled(model, policy)(x))
    precisions = {gemm.name: gemm.precision for gemm in gemms()}
    assert precisions == {name: "bf16" if name[0] == "1" else "mxfp8" for name in linears(model)}, precisions
assert torch.equal(*outputs), "a region changes the result"
