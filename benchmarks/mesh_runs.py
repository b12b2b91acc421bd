"""Compares published training runs with estimates of one rank of their mesh (`mxcompile mesh --links`).

Models are Llamas on the meta device with torchtitan's module names, parallelised and checkpointed as in the
runs. A run gives tokens per second and GPU, or the ratio of two steps. Needs no GPU.
Usage: python benchmarks/mesh_runs.py [--only NAME …]     estimates, kept in results/mesh_runs.jsonl
       python benchmarks/mesh_runs.py --table --write     only the table, into docs/mesh.md
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import mxcompile
from mxcompile.mesh.time import StepTime
from mxcompile.offline import Range
from mxcompile.ranks.parallel import parallelised

PAGE = Path(__file__).resolve().parent.parent / "docs" / "mesh.md"
BEGIN, END = "<!-- runs: begin -->", "<!-- runs: end -->"

SIZES = {"8B": (4096, 14336, 32), "70B": (8192, 28672, 80), "405B": (16384, 53248, 126)}
"""(width, width of the feed-forward, number of layers), by size."""
WORDS, HEAD, KEYS = 128256, 128, 8


@dataclass(frozen=True, kw_only=True)
class Run:
    """A published run.

    size: key of `SIZES`. mesh, parallel, target, links, schedule, microbatches: as in `explain_rank`. batch:
    sequences of a tensor-parallel group, per micro-batch in a pipeline. length: tokens of a sequence.
    recompute: "none", "op" (every second product) or "full". tps: tokens per second and GPU, by policy.
    ratio: low and high speed of the policy ÷ BF16's. off: differences between the run and the estimate.
    """

    name: str
    source: str
    size: str
    mesh: str
    parallel: str
    target: str
    links: str
    batch: int
    length: int = 8192
    recompute: str
    tps: dict[str, float]
    ratio: tuple[float, float] | None = None
    off: str = ""
    schedule: str | None = None
    microbatches: int | None = None

    @property
    def policy(self) -> str:
        """The policy that the run compares with BF16."""
        return next((policy for policy in self.tps if policy != "bf16"), "bf16")


_TITAN: dict[str, Any] = {
    "source": "torchtitan, llama3_h100_202412",
    "target": "sm_90",
    "links": "nvlink=450,net=50",
}
_POWER = "cards of 500 W with 2.4 TB/s"

RUNS = (
    Run(
        name="8B, 8 × H100",
        size="8B",
        mesh="dp=8",
        parallel="fsdp",
        batch=2,
        recompute="op",
        tps={"fp8_tensor": 8532, "bf16": 6667},
        off=_POWER,
        **_TITAN,
    ),
    Run(
        name="8B, 128 × H100",
        size="8B",
        mesh="dp=128",
        parallel="fsdp",
        batch=2,
        recompute="op",
        tps={"fp8_tensor": 8380, "bf16": 6514},
        off=_POWER,
        **_TITAN,
    ),
    Run(
        name="70B, 256 × H100",
        size="70B",
        mesh="dp=32,tp=8",
        parallel="fsdp,tp=llama",
        batch=16,
        recompute="full",
        tps={"fp8_tensor": 829},
        off=f"{_POWER}; no sequence parallelism here",
        **_TITAN,
    ),
    *(
        Run(
            name=f"405B, 512 × H100, {schedule}",
            size="405B",
            mesh="pp=8,dp=8,tp=8",
            parallel="fsdp,tp=llama",
            batch=4,
            recompute="full",
            tps={"fp8_tensor": tps},
            off=f"{_POWER}; micro-batches not said",
            schedule=schedule,
            microbatches=8,
            **_TITAN,
        )
        for schedule, tps in (("1F1B", 100), ("Interleaved1F1B", 128))
    ),
    Run(
        name="8B, 64 × H200",
        source="torchtitan, llama3_8b_h200_2025-06",
        size="8B",
        mesh="dp=64",
        parallel="fsdp",
        target="sm_90",
        links="nvlink=450,net=50",
        batch=2,
        recompute="op",
        tps={"fp8_tensor": 10753},
        off="weights travel in FP8 there",
    ),
    Run(
        name="8B, 4 × B200",
        source="torchtitan, docs/nvfp4.md",
        size="8B",
        mesh="dp=4",
        parallel="fsdp",
        target="sm_100",
        links="nvlink=900",
        batch=32,
        length=2048,
        recompute="full",
        tps={"nvidia": 28084, "bf16": 21919},
        off="casts of torchao; recomputation not said",
    ),
    Run(
        name="70B, 1,856 × B200",
        source="PyTorch's blog, Crusoe",
        size="70B",
        mesh="dp_replicate=58,dp_shard=32",
        parallel="fsdp",
        target="sm_100",
        links="nvlink=900,net=50",
        batch=1,
        recompute="full",
        tps={"nvidia": 0.0},
        ratio=(1.22, 1.28),
        off="HSDP with context parallelism of 2 there; groups, batch and recomputation not said",
    ),
)


def _every_second() -> Any:
    """Returns checkpoint contexts that save attention and every second product (torchtitan's "op")."""
    seen = {False: 0, True: 0}
    kept = (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,)

    def decide(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator is torch.ops.aten.mm.default:
            seen[context.is_recompute] += 1
            return (
                CheckpointPolicy.MUST_SAVE
                if seen[context.is_recompute] % 2
                else CheckpointPolicy.PREFER_RECOMPUTE
            )
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


_WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "none": lambda block: block,
    "full": checkpoint_wrapper,
    "op": functools.partial(checkpoint_wrapper, context_fn=_every_second),
}


class Attention(nn.Module):
    """Grouped-query attention with rotary position embeddings."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.wk, self.wv = (nn.Linear(width, KEYS * HEAD, bias=False) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns the result for `x` [batch, length, width]. cos, sin: [length, head]."""
        q, k, v = (part(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.wq, self.wk, self.wv))
        q, k = (
            heads * cos + torch.cat((-heads[..., HEAD // 2 :], heads[..., : HEAD // 2]), -1) * sin
            for heads in (q, k)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        result: Tensor = self.wo(mixed.transpose(1, 2).flatten(-2))
        return result


class FeedForward(nn.Module):
    """A SwiGLU feed-forward network."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the result for `x` [batch, length, width]."""
        result: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return result


class Block(nn.Module):
    """A decoder layer."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(width), Attention(width)
        self.ffn_norm, self.feed_forward = nn.RMSNorm(width), FeedForward(width, inner)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns the result for `x` [batch, length, width]. cos, sin: [length, head]."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        result: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return result


class Llama(nn.Module):
    """Llama-3 with torchtitan's module names."""

    def __init__(self, width: int, inner: int, layers: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList([Block(width, inner) for _ in range(layers)])
        self.norm, self.output = nn.RMSNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns the logits of `ids` [batch, length]. cos, sin: [length, head]."""
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        result: Tensor = self.output(self.norm(x))
        return result


def step(run: Run) -> StepTime:
    """Returns the estimated step time of a run."""

    def factory(mesh: Any) -> Any:
        model: Any = Llama(*SIZES[run.size])
        for number, block in enumerate(model.layers):
            model.layers[number] = _WRAPPED[run.recompute](block)
        ids = torch.zeros(run.batch, run.length, dtype=torch.int64)
        cos, sin = (torch.zeros(run.length, HEAD, dtype=torch.bfloat16) for _ in range(2))
        return parallelised(model, run.parallel, mesh), (ids, cos, sin), {}

    report = mxcompile.explain_rank(
        factory,
        mesh=run.mesh,
        policy=run.policy,
        target=run.target,
        links=run.links,
        strict=False,
        schedule=run.schedule,
        microbatches=run.microbatches,
    )
    assert report.time is not None
    return report.time


def figures(run: Run) -> dict[str, Any]:
    """Returns the row of a run: estimated tokens per second and GPU by policy, and the ratio of steps."""
    time = step(run)
    axes = dict(word.split("=") for word in run.mesh.split(","))
    tokens = (
        (run.microbatches or 1) * run.batch * run.length / int(axes.get("tp", 1)) / int(axes.get("pp", 1))
    )
    steps = {"bf16": time.range(time.works[-1]), run.policy: time.us}
    speeds = {
        policy: [tokens / us * 1e6 for us in (span.high, span.centre, span.low)]
        for policy, span in steps.items()
    }
    over = time.over(time.works[-1], time.works[0])
    return {"run": run.name, "speeds": speeds, "ratio": [over.low, over.centre, over.high]}


def speeds() -> str:
    """Returns the table of measured and estimated tokens per second and GPU."""
    rows = [
        {
            "run": run.name,
            "policy": policy,
            "measured tokens/s a GPU": f"{tps:,}",
            "estimate": _span(row["speeds"][policy], ",.0f"),
            "÷": f"{tps / row['speeds'][policy][1]:.2f}",
            "source": run.source,
        }
        for run, row in _estimated_runs()
        for policy, tps in run.tps.items()
        if tps
    ]
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


def ratios() -> str:
    """Returns the table of measured and estimated speeds relative to BF16."""
    rows = []
    for run, row in _estimated_runs():
        if run.ratio is not None:
            measured = "–".join(f"{end:.2f}" for end in run.ratio)
        elif len(run.tps) > 1:
            measured = f"{run.tps[run.policy] / run.tps['bf16']:.2f}"
        else:
            continue
        rows.append(
            {
                "run": run.name,
                "policy": run.policy,
                "measured speed over BF16's": measured,
                "estimate": _span(row["ratio"], ".2f"),
                "differs by": run.off,
            }
        )
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


def _estimated_runs() -> Iterator[tuple[Run, dict[str, Any]]]:
    """Returns the runs that have estimates, with the newest estimate of each."""
    newest = {row["run"]: row for row in common.read("mesh_runs")}
    return ((run, newest[run.name]) for run in RUNS if run.name in newest)


def _span(values: Sequence[float], form: str) -> str:
    return Range(*values).text(form)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", help="names of runs")
    parser.add_argument("--table", action="store_true", help="only show what is in the results")
    parser.add_argument("--write", action="store_true", help="put the tables into their page")
    options = parser.parse_args()
    for run in () if options.table else RUNS:
        if not options.only or run.name in options.only:
            common.write("mesh_runs", [figures(run)])
    tables = f"{speeds()}\n\n{ratios()}"
    print(tables)
    if options.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{tables}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
