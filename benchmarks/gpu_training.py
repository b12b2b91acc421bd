"""Training step of a Llama of about one billion parameters on the GPU of this machine, by preset.

A step is forward, backward and AdamW, alternating with BF16 under Inductor. Rows also have its peak memory.
torchao takes part if it is installed, emulated if the chip has no MX GEMM.
Without a GPU it prints a line and measures nothing. Usage: python benchmarks/gpu_training.py [--layers 16]
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import common
import gpu_common
import torch
from gpu_predicted import BF16, CompiledProgram, Row
from torch import Tensor, nn

import mxcompile
from mxcompile.lowering.targets import of_chip
from mxcompile.offline import Rates, Work
from mxcompile.offline.training import update_bytes

VOCABULARY = 32768
TORCHAO = "torchao mxfp8"
POLICIES = ("nvidia", "fp8_delayed")
Step = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of the model and of a batch of tokens."""

    layers: int
    width: int
    batch: int
    length: int

    def model(self) -> nn.Module:
        """Returns a Llama on the default device."""
        heads = max(1, self.width // 128)
        sizes = {"layers": self.layers, "width": self.width, "feed_forward": 4 * self.width}
        return common.llama(**sizes, vocabulary=VOCABULARY, heads=heads)

    def tokens(self) -> Tensor:
        """Returns random tokens [batch, length]."""
        return torch.randint(VOCABULARY, (self.batch, self.length))

    def update(self) -> Work:
        """Returns the work of AdamW."""
        with torch.device("meta"):
            parameters = sum(parameter.numel() for parameter in self.model().parameters())
        return Work(num_bytes=update_bytes(2 * parameters)["optimizer"])


@dataclass(frozen=True, kw_only=True)
class TrainingProgram(CompiledProgram):
    """A training step under the preset, or by the library, with the name `kernel`."""

    size: Size

    def code(self, target: str) -> mxcompile.CodegenResult:
        """Returns the code of forward and backward for `target`, without the optimizer."""
        with torch.device("meta"):
            model, tokens = self.size.model(), self.size.tokens()
        batch = {"input_ids": tokens, "labels": tokens}
        return mxcompile.codegen(model, target=target, policy=self.kernel, kwargs=batch)

    def measure(self, rates: Rates, repeats: int) -> Iterator[Row]:
        """Yields a row with the times of the step and of the BF16 step, and the peak memory."""
        base, _ = step(BF16, self.size)
        run, memory = step(self.kernel, self.size)
        times = gpu_common.alternate({"baseline": base, self.kernel: run}, repeats)
        expected = {} if self.kernel == TORCHAO else self.expected(times[self.kernel], rates)
        yield {
            **gpu_common.row(self.about, times, "BF16 (Inductor)"),
            "peak_gib": round(memory, 2),
            **expected,
        }


@functools.lru_cache(maxsize=2)
def step(kernel: str, size: Size) -> tuple[Step, float]:
    """Returns a step, and its peak GiB with weights, gradients and optimizer states."""
    before = torch.cuda.memory_allocated()
    with torch.device(gpu_common.DEVICE):
        model, tokens = size.model(), size.tokens()
    if kernel == TORCHAO:
        native = gpu_common.here().native
        model = common.torchao_model(model, emulated=not native)
    backend = "inductor" if kernel in (BF16, TORCHAO) else "mxfp8"
    options = {"policy": kernel} if backend == "mxfp8" else None
    compiled: Any = torch.compile(model, backend=backend, options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        compiled(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()

    for _ in range(2):  # compiles, and allocates the optimizer states
        torch.cuda.reset_peak_memory_stats()
        run()
    return run, (torch.cuda.max_memory_allocated() - before) / 2**30


def main() -> None:
    parser = gpu_common.parser(__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    options = parser.parse_args()
    size = Size(layers=options.layers, width=options.width, batch=options.batch, length=options.length)
    if options.small:
        size = Size(layers=1, width=256, batch=1, length=256)
    torch._dynamo.config.recompile_limit = 64  # each policy compiles the same code

    def programs(target: str) -> Iterator[TrainingProgram]:
        names = [BF16, *(name for name in POLICIES if name == "nvidia" or of_chip(target).fp8_tiles)]
        if importlib.util.find_spec("torchao") is not None and not options.compile:
            names.append(TORCHAO)
        for name in names:
            yield TrainingProgram(
                part="training",
                kernel=name,
                shape=f"llama {size.layers}×{size.width}, {size.batch}×{size.length} tokens",
                beside=size.update(),
                size=size,
            )

    gpu_common.run(options, programs)


if __name__ == "__main__":
    main()
