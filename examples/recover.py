"""A run that recovers by itself: a fault ruins a GEMM in MXFP8, and a rule puts that GEMM into BF16."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from tiny import Model, batch
from torch import Tensor, nn

import mxcompile
from mxcompile.watch import read

SAMPLES, POLICY = Path("recover.jsonl"), Path("recover.policy.yaml")
FAULT, STEPS = 38, 61
RULES = [{"when": {"underflow": "> 0.5"}, "operand": "x", "do": "bf16"}]


def add_outliers(layer: nn.Linear) -> None:
    """Adds a hook that adds `layer.outliers` to the input. The caller keeps weights of outlier features 0."""
    layer.register_buffer("outliers", torch.zeros(layer.in_features))

    def add(module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        return inputs[0] + module.outliers

    layer.register_forward_pre_hook(add)


def main() -> None:
    """Trains 61 steps, with the fault from step 38 on, and prints the loss around it."""
    logging.basicConfig(format="%(message)s")
    torch.manual_seed(0)
    SAMPLES.unlink(missing_ok=True)
    model = Model()
    layers = [block.down for block in model.blocks]
    for layer in layers:
        add_outliers(layer)
    watch = mxcompile.Watch(SAMPLES, every=10, rules=RULES)
    compiled = torch.compile(model, backend="mxfp8", options={"watch": watch})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        with torch.no_grad():
            for layer in layers:
                layer.weight[:, ::32] = 0.0
                layer.outliers[::32] = 1e6 if step >= FAULT else 0.0
        loss = compiled(batch())
        loss.backward()
        watch.loss(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0 or FAULT - 2 < step < FAULT + 6:
            print(f"step {step:2}  loss {losses[-1]:.3f}", flush=True)
    watch.close()
    fired = [record for record in read(SAMPLES) if record["kind"] == "rule"]
    for record in fired:
        print(record["effect"])
    print(POLICY.read_text(encoding="utf-8"))
    assert {(record["step"], record["gemm"]) for record in fired} == {(40, "fprop")}
    assert min(losses[FAULT:41]) > 1.3 * losses[FAULT - 1]
    assert losses[41] < 0.8 * losses[40]
    assert losses[-1] < losses[FAULT - 1]


if __name__ == "__main__":
    main()
