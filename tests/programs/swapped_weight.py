"""torch.utils.swap_tensors replaces a weight after a step: the next call uses it, with delayed scales too."""

import torch
from shared import EVERYTHING, compiled
from torch import nn


class Net(nn.Module):
    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.a, self.b, self.cut = nn.Linear(64, 128), nn.Linear(128, 48), cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.a(x))
        if self.cut:
            torch._dynamo.graph_break()
        return self.b(x)


DELAYED = {"version": 1, "preset": "fp8_delayed", "rules": [{"match": {"name": "*"}, "use": "fp8"}]}
for policy, cut in ((EVERYTHING, False), (EVERYTHING, True), (DELAYED, False)):
    model = Net(cut)
    call = compiled(model, policy, strict=False)
    call(torch.randn(40, 64)).sum().backward()
    model.zero_grad()
    torch.utils.swap_tensors(model.b.weight, nn.Parameter(torch.zeros(48, 128)))
    with torch.no_grad():
        y = call(torch.ones(40, 64))
    assert torch.allclose(y, model.b.bias.expand_as(y)), f"the old weight is used: {policy}, cut: {cut}"
