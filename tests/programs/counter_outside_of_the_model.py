"""A forward counts its calls in a dict and divides by the count: outputs and count are eager mode's."""

import torch
from shared import Cut

STATE = {"calls": 0}


def divided(x: torch.Tensor) -> torch.Tensor:
    STATE["calls"] += 1
    return x / STATE["calls"]


outputs = {}
for backend, options in (("eager", None), ("mxfp8", {"policy": "bf16"})):
    torch._dynamo.reset()
    torch.manual_seed(0)
    STATE["calls"] = 0
    call = torch.compile(Cut(divided), backend=backend, options=options)
    with torch.no_grad():
        outputs[backend] = [call(torch.ones(40, 64)) for _ in range(4)]
    assert STATE["calls"] == 4, (backend, STATE)
for eager, output in zip(outputs["eager"], outputs["mxfp8"], strict=True):
    assert torch.allclose(output, eager, atol=1e-5), "an output is not eager mode's"
assert not torch.allclose(*outputs["eager"][:2], atol=1e-2), "the count does not change outputs"
