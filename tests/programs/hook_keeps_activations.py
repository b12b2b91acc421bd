"""A forward hook appends to a list, in the graph or not; each call of a cut model adds one real tensor."""

import torch
from shared import Cut, compiled


def check(disabled: bool) -> None:
    kept, model = [], Cut()

    def keep(module, args, output):
        kept.append(output)

    model.first.register_forward_hook(torch.compiler.disable(keep) if disabled else keep)
    call = compiled(model, strict=False)
    with torch.no_grad():
        for _ in range(2):
            call(torch.randn(40, 64))
    assert [type(value) for value in kept] == [torch.Tensor, torch.Tensor], (disabled, kept)


check(disabled=False)
check(disabled=True)
