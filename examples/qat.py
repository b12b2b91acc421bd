"""Train under the serving policy, export the weights, and serve exactly the trained function."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from tiny import Model, batch
from torch import Tensor, nn
from torch.nn import functional as F

import mxcompile

ROLES = ["qkv", "attn_out", "ffn_in", "ffn_out"]
SERVED: dict[str, Any] = {
    "version": 1,
    "preset": "bf16",
    "rules": [{"match": {"role": ROLES}, "use": {"precision": "mxfp4", "backward": "dequantized"}}],
}
"""Forward multiplies in MXFP4. Backward multiplies the dequantized operands in the model's dtype."""


class Predictor(Model):
    """The model of tiny.py, with logits as its result."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of the next token after each of `tokens`."""
        return self.logits(tokens)


def compiled(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Returns `model`, compiled under the policy."""
    return torch.compile(model, backend="mxfp8", options={"policy": SERVED})


def train(model: nn.Module, call: Callable[[Tensor], Tensor]) -> None:
    """Trains the parameters of `model` through `call` for 60 steps."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        tokens = batch()
        loss_of(call(tokens[:, :-1]), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Returns the mean loss of predicting each token from the tokens before it."""
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def update(server: nn.Module, model: nn.Module, tokens: Tensor) -> None:
    """Copies the exported weights of `model` (qdata and scales) to `server`, as for a rollout server."""
    for name, codes, scales, _ in mxcompile.export_weights(model, policy=SERVED, args=(tokens,)):
        value = codes
        if scales is not None:
            elements, bytes_ = codes.view(torch.float4_e2m1fn_x2), scales.view(torch.float8_e8m0fnu)
            value = mxcompile.MXTensor(elements, bytes_, -1, torch.float32)
        owner, _, attribute = name.rpartition(".")
        setattr(server.get_submodule(owner), attribute, nn.Parameter(value, requires_grad=False))


def main() -> None:
    """Compares training in MXFP4 with training without it, both served in MXFP4."""
    torch.manual_seed(0)
    aware, server = Predictor(), Predictor().requires_grad_(False)
    unaware = copy.deepcopy(aware)
    training, serving = compiled(aware), compiled(server)
    train(aware, training)
    train(unaware, unaware)
    tokens = batch()
    losses = {}
    for name, model in (("trained without", unaware), ("trained for it", aware)):
        update(server, model, tokens[:, :-1])
        with torch.no_grad():
            logits = serving(tokens[:, :-1])
        losses[name] = loss_of(logits, tokens).item()
        print(f"served in MXFP4, {name}: loss {losses[name]:.4f}")
    forward = training(tokens[:, :-1]).detach()
    print("logits of the server and of training:", "equal" if torch.equal(logits, forward) else "different")
    assert torch.equal(logits, forward)
    assert losses["trained for it"] < losses["trained without"]


if __name__ == "__main__":
    main()
