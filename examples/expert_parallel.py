"""Expert parallelism on four ranks: the all-to-alls send tokens and their gradients in MXFP8."""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.nn import functional as F

import mxcompile

RANKS, EXPERTS, TOP_K, WIDTH, HIDDEN = 4, 8, 2, 64, 96
POLICY = {
    "version": 1,
    "rules": [
        {"match": {"role": "router"}, "use": "bf16"},
        {"match": {"name": "*"}, "use": {"precision": "mxfp8", "sent": "mxfp8"}},
    ],
}


class Experts(nn.Module):
    """The feed-forward networks of a rank, computed as grouped products. Tokens are sorted by expert."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.randn(number, HIDDEN, WIDTH) / 8) for _ in range(2))
        self.down = nn.Parameter(torch.randn(number, WIDTH, HIDDEN) / 8)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Returns the outputs [tokens, WIDTH]. ends: end of each expert's tokens in `x`."""
        gate, up, down = (weight.transpose(-2, -1) for weight in (self.gate, self.up, self.down))
        hidden = F.silu(F.grouped_mm(x, gate, offs=ends)) * F.grouped_mm(x, up, offs=ends)
        return F.grouped_mm(hidden, down, offs=ends)


class MixtureOfExperts(nn.Module):
    """Top-k routing to experts that are distributed over the ranks of `group` in order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.ranks = group, group.size()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts(EXPERTS // self.ranks)

    def forward(self, x: Tensor) -> Tensor:
        """Returns `x` [tokens, WIDTH] plus the outputs of its experts, weighted by their scores."""
        scores, choices = self.router(x).float().softmax(-1).topk(TOP_K)
        order = choices.flatten().argsort(stable=True)
        counts = torch.zeros(EXPERTS, dtype=torch.int64).scatter_add(
            0, choices.flatten(), torch.ones_like(choices.flatten())
        )
        counts = counts.view(self.ranks, -1)
        received = all_to_all_single(counts, None, None, self.group)  # tokens by rank and expert
        to_ranks, from_ranks = counts.sum(1).tolist(), received.sum(1).tolist()
        tokens = all_to_all_single_autograd(x[order // TOP_K], from_ranks, to_ranks, self.group)
        experts = torch.arange(received.shape[1]).repeat(self.ranks)
        by_expert = experts.repeat_interleave(received.flatten(), output_size=tokens.shape[0]).argsort(
            stable=True
        )
        ends = received.sum(0).cumsum(0).int()
        outputs = self.experts(tokens[by_expert], ends)[by_expert.argsort()]
        outputs = all_to_all_single_autograd(outputs, to_ranks, from_ranks, self.group)
        weighted = outputs * scores.flatten()[order].unsqueeze(-1).to(x.dtype)
        return x.index_add(0, order // TOP_K, weighted)


def train(rank: int, folder: str) -> None:
    """Trains three steps on `rank` and prints the report of rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=RANKS)
    torch._dynamo.config.capture_scalar_outputs = True  # token counts become sizes in the graph
    torch.manual_seed(0)
    assert dist.group.WORLD is not None
    model = MixtureOfExperts(dist.group.WORLD).bfloat16()
    compiled = torch.compile(model, backend="mxfp8", fullgraph=True, options={"policy": POLICY})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for _ in range(3):
        x = torch.randn(128, WIDTH, dtype=torch.bfloat16)
        loss = (compiled(x) - x.roll(1, -1)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        report = mxcompile.reports()[-1]
        print(report)
        assert report.summary.wire_bytes < report.summary.wire_bytes_bf16
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, (folder,), nprocs=RANKS)
