"""Times the generated code for casts and stored weights on this machine's GPU, each with a baseline.

    casts    casts that models run on this chip, alone and behind a norm or a gated activation, against the
             same source stored in BF16; the baseline of a cast alone is a copy
    decode   products with stored weights, 1 to 32 tokens, against cuBLAS in BF16; then layers of Llama 8B
             with stored weights, against BF16 under Inductor

Casts alone and products are first compared with their reference on the device: casts bit for bit, products
within FP32 accumulation. Calls are captured in CUDA graphs, over enough copies of the operands to defeat the
L2 cache, and timed in alternating rounds; figures are medians. Rows include the estimate. Without a GPU
it prints a line and measures nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gpu_common
import gpu_graphs
import predicted
import torch
from gpu_common import LAYERS, Call, check_bits, check_product, copies_for, quantized, row, values
from gpu_predicted import CompiledProgram, Row
from torch import Tensor, nn

import mxcompile
from mxcompile.formats import ScaleLayout
from mxcompile.lowering.targets import of_chip
from mxcompile.offline import Rates

CAST_SHAPES = ((8192, 4096), (8192, 14336))
DECODE_TOKENS = (1, 8, 32, 2, 4, 16)
STORED_LAYERS = 4
STORED_KINDS = ("bf16", "mxfp8", "nvfp4", "mxfp4")


@dataclass(frozen=True, kw_only=True)
class CastProgram(CompiledProgram):
    """A program that runs one graph of casts."""

    graph: gpu_graphs.Graph

    def code(self, target: str) -> mxcompile.CodegenResult:
        """Returns the code for `target`."""
        return self.graph.code(target)

    def measure(self, rates: Rates, repeats: int) -> Iterator[Row]:
        """Yields a row with the time of the generated code."""
        graph = self.graph
        torch._dynamo.reset()
        num_bytes = self.num_bytes(rates)
        inputs = [graph.inputs() for _ in range(copies_for(int(num_bytes)))]
        compiled, plain = graph.compiled(), torch.compile(gpu_graphs.Module(graph.plain), dynamic=False)
        if graph.exact:
            for result, wanted in zip(compiled(*inputs[0]), graph.compute(*inputs[0]), strict=True):
                check_bits(result, wanted, graph.name)
        runs: dict[str, Sequence[Call]] = {
            self.kernel: [lambda arguments=arguments: compiled(*arguments) for arguments in inputs],
            "baseline": [lambda arguments=arguments: plain(*arguments) for arguments in inputs],
        }
        times = gpu_common.graph_times(runs, repeats)
        time = times[self.kernel]
        speed = gpu_common.bandwidth(time, rates.target.peak, num_bytes)
        baseline = "a copy (Inductor)" if graph.exact else "its source in BF16 (Inductor)"
        yield {**row(self.about, times, baseline), **speed, **self.expected(time, rates)}


def casts(target: str, small: bool) -> Iterator[CastProgram]:
    """Yields each cast of each shape, alone and with its prologue."""
    for m, n in ((256, 512),) if small else CAST_SHAPES:
        for graph in gpu_graphs.casts(m, n, of_chip(target)):
            yield CastProgram(part="casts", kernel=graph.name, shape=f"{m}x{n}", graph=graph)


@dataclass(frozen=True, kw_only=True)
class ProductProgram(CompiledProgram):
    """A weight-only product of x [m, k] and w [n, k]."""

    size: tuple[int, int, int]

    def code(self, target: str) -> mxcompile.CodegenResult:
        """Returns the code for `target`."""
        m, n, k = self.size
        with torch.device("meta"):
            x, w = torch.empty(m, k, dtype=torch.bfloat16), torch.empty(n, k, dtype=torch.float8_e4m3fn)
            scale = torch.empty(n, k // 32, dtype=torch.uint8)
        return gpu_graphs.code(gpu_graphs.weight_only, [x, w, scale], target)

    @torch.no_grad()
    def measure(self, rates: Rates, repeats: int) -> Iterator[Row]:
        """Yields a row with the time of the product and of cuBLAS in BF16."""
        m, n, k = self.size
        dense, weights = _weights(n, k)
        x = torch.randn(m, k, device=gpu_common.DEVICE).bfloat16()
        torch._dynamo.reset()
        product = torch.compile(gpu_graphs.weight_only, dynamic=False)
        check_product(product(x, *weights[0]), x, values(weights[0]), "weight_only_mm")
        runs: dict[str, Sequence[Call]] = {
            "baseline": [lambda w=w: x @ w.t() for w in dense],
            self.kernel: [lambda w=w: product(x, *w) for w in weights],
        }
        times = gpu_common.graph_times(runs, repeats)
        time = times[self.kernel]
        speed = gpu_common.bandwidth(time, rates.target.peak, n * k * 33 / 32)
        yield {**row(self.about, times, "torch.mm (bfloat16)"), **speed, **self.expected(time, rates)}


@functools.lru_cache(maxsize=1)
def _weights(n: int, k: int) -> Any:
    return quantized(n, k, copies_for(n * k), ScaleLayout.ROW_MAJOR)


def products(small: bool) -> Iterator[ProductProgram]:
    """Yields weight-only products for the layers of Llama and few tokens, a single token first."""
    sizes = ((96, 128),) if small else (*LAYERS["llama-8b"], *LAYERS["llama-70b"])
    for m in DECODE_TOKENS[:1] if small else DECODE_TOKENS:
        for n, k in sizes:
            size = m, n, k
            yield ProductProgram(part="decode", kernel="weight_only_mm", shape=f"{m}x{n}x{k}", size=size)


class Layers(nn.Module):
    """Decoder layers of Llama 8B, or smaller ones."""

    def __init__(self, number: int, small: bool) -> None:
        super().__init__()
        layers = [predicted.Layer(small) for _ in range(number)]
        self.layers, self.width, self.head = nn.ModuleList(layers), layers[0].width, layers[0].head

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns the output of the layers for `x` [tokens, 1, width], where each token is a sequence."""
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


@dataclass(frozen=True, kw_only=True)
class StoredProgram(CompiledProgram):
    """Layers with weights stored in the precision `kind`."""

    kind: str
    tokens: int
    small: bool

    def model(self, device: str) -> tuple[nn.Module, tuple[Tensor, Tensor, Tensor]]:
        """Returns the model with stored weights, and its inputs."""
        torch.manual_seed(0)
        with torch.device(device):
            model = Layers(1 if self.small else STORED_LAYERS, self.small)
            model.bfloat16().eval()
            x = torch.randn(self.tokens, 1, model.width, dtype=torch.bfloat16)
            angles = torch.rand(1, 1, model.head)
        inputs = x, angles.cos().bfloat16(), angles.sin().bfloat16()
        if self.kind != "bf16":
            rules = [{"match": {"name": "*_proj"}, "use": self.kind}]
            policy = {"version": 1, "preset": "inference", "rules": rules}
            mxcompile.quantize_weights_(model, policy, args=inputs)
        return model, inputs

    def code(self, target: str) -> mxcompile.CodegenResult:
        """Returns the code for `target`."""
        model, inputs = self.model("cpu")
        return mxcompile.codegen(model, *inputs, target=target, training=False, policy="bf16")

    @torch.no_grad()
    def measure(self, rates: Rates, repeats: int) -> Iterator[Row]:
        """Yields a row with the time of one decode step and of the BF16 step."""
        torch._dynamo.reset()
        runs: dict[str, Sequence[Call]] = {}
        base = StoredProgram(**{**vars(self), "kind": "bf16"})
        for name, program in (("baseline", base), (self.kernel, self)):
            model, inputs = program.model(gpu_common.DEVICE)
            options = {"policy": "bf16"} if program.kind != "bf16" else None
            backend = "mxfp8" if program.kind != "bf16" else "inductor"
            step = torch.compile(model, backend=backend, dynamic=False, options=options)
            out = step(*inputs)
            if not torch.isfinite(out).all():
                raise gpu_common.WrongError(f"{program.kind}: a result is not finite")
            runs[name] = [functools.partial(step, *inputs)]
        times = gpu_common.graph_times(runs, repeats)
        time = times[self.kernel]
        yield {**row(self.about, times, "BF16 (Inductor)"), **self.expected(time, rates)}


def stored(small: bool) -> Iterator[StoredProgram]:
    """Yields a program for each precision of stored weights, with 1 token, then with 8."""
    for tokens in (1, 8):
        for kind in STORED_KINDS[1:2] if small else STORED_KINDS:
            name, shape = f"{STORED_LAYERS} layers, {kind}", f"{tokens} tokens"
            yield StoredProgram(
                part="decode", kernel=name, shape=shape, kind=kind, tokens=tokens, small=small
            )


PARTS: dict[str, Callable[[str, bool], Iterator[Any]]] = {
    "casts": casts,
    "decode": lambda _, small: (program for part in (stored(small), products(small)) for program in part),
}


def main() -> None:
    parser = gpu_common.parser(__doc__)
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS), help="what to measure")
    options = parser.parse_args()

    def programs(target: str) -> Iterator[Any]:
        for part in options.part:
            yield from PARTS[part](target, options.small)

    gpu_common.run(options, programs)


if __name__ == "__main__":
    main()
