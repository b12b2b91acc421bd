"""Train with `torch.compile(model, backend="mxfp8")`, and print what was quantized."""

from __future__ import annotations

import torch
from tiny import Model, batch

import mxcompile


def main() -> None:
    """Trains 30 steps."""
    torch.manual_seed(0)
    model = Model()
    compiled = torch.compile(model, backend="mxfp8")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        loss = compiled(batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
    print(mxcompile.reports()[-1])
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()
