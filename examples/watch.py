"""Watch a training run: sample the quantization errors of operands, and print the largest."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny import Model, batch

import mxcompile
from mxcompile.watch import read

FILE = Path("run.jsonl")


def main() -> None:
    """Trains 21 steps, of which every tenth is sampled, and prints the worst operands of each sample."""
    torch.manual_seed(0)
    FILE.unlink(missing_ok=True)
    model, watch = Model(), mxcompile.Watch(FILE, every=10)
    compiled = torch.compile(model, backend="mxfp8", options={"watch": watch})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(21):
        compiled(batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    watch.close()
    samples = [record for record in read(FILE) if record["kind"] == "sample"]
    for sample in samples:
        print(f"step {sample['step']}")
        for row in sorted(sample["rows"], key=lambda row: row["sqnr"])[:3]:
            print(
                f"  {row['layer']:16} {row['gemm']} {row['operand']:2} {row['sqnr']:.1f} dB,"
                f" {row['underflow']:.2%} underflow"
            )
    assert [sample["step"] for sample in samples] == [0, 10, 20]


if __name__ == "__main__":
    main()
