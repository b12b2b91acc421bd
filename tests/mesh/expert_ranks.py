"""What runs on real ranks: a layer with experts on all of them, and every exchange that the profiler sees."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from helpers.eager_backend import EagerBackend
from helpers.ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from mxcompile.ranks.experts import spread_

TOKENS, NUMBER, TOP_K = 32, 8, 2
ITEMS = {"unsigned char": ("uint8", 1), "c10::BFloat16": ("bfloat16", 2), "long int": ("int64", 8)}


def example() -> Any:
    path = Path(__file__).parents[2] / "examples/expert_parallel.py"
    spec = importlib.util.spec_from_file_location("expert_parallel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Layer(nn.Module):
    """The example's experts behind a layer, so that tokens have a gradient."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        sizes = example()
        self.before = nn.Linear(sizes.WIDTH, sizes.WIDTH, bias=False)
        self.moe = sizes.MixtureOfExperts(group)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(self.before(x))


def layer(mesh: DeviceMesh) -> tuple[nn.Module, tuple[Tensor], dict[str, Any]]:
    """A factory: its own code exchanges rows."""
    x = torch.randn(TOKENS, example().WIDTH).bfloat16()
    return Layer(mesh["ep"].get_group()).bfloat16(), (x,), {}


def sent_by(rank: int, mesh: DeviceMesh, policy: Any) -> dict[str, int]:
    """Bytes that this rank gives Gloo to exchange in a step, by dtype."""
    torch._dynamo.reset()
    torch.manual_seed(rank)
    model, (x,), _ = layer(mesh)
    compiled = torch.compile(model, backend=EagerBackend(policy=policy), fullgraph=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as seen:
        compiled(x).float().square().sum().backward()
    num_bytes: Counter[str] = Counter()
    for event in seen.profiler.kineto_results.events():
        if event.name() == "gloo:all_to_all":
            dtype, size = ITEMS[event.dtypes()[0]]
            num_bytes[dtype] += math.prod(event.shapes()[0]) * size
    return dict(num_bytes)


def spread_and_plain(rank: int, mesh: DeviceMesh) -> list[tuple[Tensor, Tensor]]:
    """Results and gradients of transformers' experts on several ranks, each beside that of all on one."""
    config = hf.MixtralConfig(
        hidden_size=64, intermediate_size=96, num_local_experts=NUMBER, experts_implementation="grouped_mm"
    )
    torch.manual_seed(0)
    plain, spread = MixtralExperts(config), MixtralExperts(config)
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.1)
    spread.load_state_dict(plain.state_dict())
    spread_(spread, mesh["ep"])
    torch.manual_seed(rank + 1)
    x, choices = torch.randn(TOKENS, 64), torch.rand(TOKENS, NUMBER).topk(TOP_K).indices
    weights = torch.rand(TOKENS, TOP_K)
    pairs = []
    for module in (plain, spread):
        leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
        y = module(leaves[0], choices, leaves[1])
        y.square().sum().backward()
        pairs.append((y.detach(), *(leaf.grad for leaf in leaves)))
    local = NUMBER // mesh.size()
    for parameter in plain.parameters():
        dist.all_reduce(parameter.grad)
    mine = slice(rank * local, (rank + 1) * local)
    gradients = [(q.grad, p.grad[mine]) for p, q in zip(plain.parameters(), spread.parameters(), strict=True)]
    return [*zip(*reversed(pairs), strict=True), *gradients]


def results(policies: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    torch._dynamo.config.capture_scalar_outputs = True
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    sent = {name: sent_by(rank, mesh, policy) for name, policy in policies.items()}
    return sent, spread_and_plain(rank, mesh)


def run_on(ranks: int, folder: Path, policies: dict[str, Any]) -> list[Any]:
    """For each of `ranks`, the bytes under each of `policies`, and pairs of tensors that have to agree."""
    return on_ranks(ranks, folder, results, policies)
