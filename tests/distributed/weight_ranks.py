"""What runs on the ranks of `test_weight_gathers`: one launch, one model, many ways to shard and call it.

Every way runs twice: with weights that are cast before FSDP2 gathers them, and with the same casts after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.eager_backend import EagerBackend
from helpers.ranks import on_ranks, results_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mxcompile

WORDS, WIDTH, HEADS, FFN, TOKENS = 50, 128, 4, 256, 24
KV = 64
"""Features of keys and values: on four ranks their shards cut tiles."""
POLICY: dict[str, Any] = {
    "version": 1,
    "rules": [
        {"match": {"name": "*.gate"}, "use": {"weight_block": "32x32", "elem_dtype": "e5m2"}},
        {"match": {"name": "*.down"}, "use": {"weight_block": "32x32", "rounding": "floor"}},
        {"match": {"name": "*"}, "use": {"weight_block": "32x32"}},
    ],
}
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Gather = Callable[..., bool]
"""Makes gathers MXFP8, or leaves them: which."""
Step = Callable[[int], Tensor]


class Block(nn.Module):
    checkpointed = False

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, KV, bias=False), nn.Linear(WIDTH, KV, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, FFN, bias=False), nn.Linear(WIDTH, FFN, bias=False)
        self.down = nn.Linear(FFN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layers, x, use_reentrant=False) if self.checkpointed else self.layers(x)

    def layers(self, x: Tensor) -> Tensor:
        n = self.norm1(x)
        q, k, v = (
            p.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for p in (self.q(n), self.k(n), self.v(n))
        )
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        n = self.norm2(x)
        return x + self.down(F.silu(self.gate(n)) * self.up(n))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block()])
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def ids(step: int, tokens: int = TOKENS) -> Tensor:
    generator = torch.Generator().manual_seed(97 * step + dist.get_rank())
    return torch.randint(0, WORDS, (2, tokens), generator=generator)


def gather(model: nn.Module, **how: Any) -> object:
    return mxcompile.quantize_gathers_(model, POLICY, args=(torch.zeros(2, TOKENS, dtype=torch.long),), **how)


def shard(model: Model, **how: Any) -> Model:
    for block in model.blocks:
        fully_shard(block, **how)
    fully_shard(model, **how)
    return model


def compiled(model: nn.Module, policy: Any = POLICY, **how: Any) -> nn.Module:
    return torch.compile(model, backend=EagerBackend(policy=policy), **how)


def accumulated(model: Model, gather: Gather) -> tuple[nn.Module, Step]:
    """Shards on the CPU; two micro-batches of different lengths, reduced once."""
    gather(model)
    sharded = shard(model, mp_policy=MIXED, offload_policy=CPUOffloadPolicy(pin_memory=False))
    call = compiled(sharded, dynamic=True)

    def run(step: int) -> Tensor:
        model.set_requires_gradient_sync(False)
        loss(call(ids(step + 50, TOKENS + 8))).backward()
        model.set_requires_gradient_sync(True)
        return loss(call(ids(step)))

    return model, run


def checkpointed(model: Model, gather: Gather) -> tuple[nn.Module, Step]:
    """BF16 masters, gathered once a step, activation checkpointing, and the backend itself."""
    model.bfloat16()
    gather(model)
    for block in model.blocks:
        block.checkpointed = True
    shard(model, reshard_after_forward=False)
    call = torch.compile(model, backend="mxfp8", options={"policy": POLICY})
    return model, lambda step: loss(call(ids(step)))


def whole_fp32(model: Model, gather: Gather) -> tuple[nn.Module, Step]:
    """One group of FP32 parameters, some frozen, under autocast: tiles are cast from FP32."""
    model.blocks[0].up.requires_grad_(False)
    model.blocks[0].q.requires_grad_(False)
    gather(model)
    call = compiled(fully_shard(model))

    def run(step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(call(ids(step)))

    return model, run


def loaded(model: Model, gather: Gather) -> tuple[nn.Module, Step]:
    """Made on the meta device, given memory after it is sharded, and another model's state by assignment."""
    state = {name: value + 0.01 for name, value in build().state_dict().items()}
    with torch.device("meta"):
        model = Model()
    gather(model)
    shard(model, mp_policy=MIXED)
    model.to_empty(device="cpu")
    here = {name: distributed(value, model.state_dict()[name]) for name, value in state.items()}
    model.load_state_dict(here, assign=True)
    call = compiled(model)
    return model, lambda step: loss(call(ids(step)))


def distributed(value: Tensor, like: Any) -> Tensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements)


def two_dimensions(model: Model, gather: Gather) -> tuple[nn.Module, Step]:
    """FSDP2 over one dimension of the mesh, tensor parallelism over the other."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    columns = {name: ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
    for block in model.blocks:
        parallelize_module(
            block, mesh["model"], {**columns, "o": RowwiseParallel(), "down": RowwiseParallel()}
        )
    gather(model, mesh=mesh["data"])
    call = compiled(shard(model, mp_policy=MIXED, mesh=mesh["data"]))
    return model, lambda step: loss(call(ids(step)))


def hybrid(model: Model, gather: Gather) -> tuple[nn.Module, Step]:
    """Two groups of two that share weights; saved by DCP, loaded into a model that never trained."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    quantized = gather(model, mesh=mesh)
    shard(model, mp_policy=MIXED, mesh=mesh)
    call = compiled(model)

    def run(step: int) -> Tensor:
        if step == 1:
            state = model.state_dict()
            shards = {name: value.to_local().clone() for name, value in state.items()}
            if quantized:  # what is loaded into the model that gathers no MXFP8 too
                dcp.save(state, checkpoint_id="checkpoint")
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            dcp.load(state, checkpoint_id="checkpoint")
            model.load_state_dict(state)
            assert all(
                torch.equal(value.to_local(), shards[name]) for name, value in model.state_dict().items()
            )
        return loss(call(ids(step)))

    return model, run


def loss(y: Tensor) -> Tensor:
    return y.float().square().mean()


@contextmanager
def counted(sent: list[tuple[str, int]]) -> Iterator[None]:
    """Note dtype and bytes of what this rank puts into every all-gather of FSDP2."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    real = getattr(dist, name)

    def counting(output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append((str(input_tensor.dtype), input_tensor.numel() * input_tensor.element_size()))
        return real(output_tensor, input_tensor, *args, **kwargs)

    with mock.patch.object(dist, name, counting):
        yield


def train(way: Callable[..., tuple[nn.Module, Step]], first: bool) -> dict[str, Any]:
    """Two steps of AdamW. first: whether weights are cast before they are gathered."""
    torch._dynamo.reset()
    mxcompile.clear_reports()
    table: list[Any] = []

    def prepare(model: nn.Module, **how: Any) -> bool:
        if first:
            table.append(gather(model, **how))
        return first

    model, step = way(build(), prepare)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=True)
    results: dict[str, Any] = {"losses": [], "sent": []}
    with counted(results["sent"]):
        for number in range(2):
            before = len(results["sent"])
            value = step(number)
            value.backward()
            results["losses"].append(value.item())
            gradients = {
                name: p.grad.to_local().clone() for name, p in model.named_parameters() if p.grad is not None
            }
            optimizer.step()
            optimizer.zero_grad()
    results["last"] = [num_bytes for _, num_bytes in results["sent"][before:]]
    results["gradients"] = gradients
    results["state"] = {name: value.to_local().clone() for name, value in model.state_dict().items()}
    results["types"] = {type(value.to_local()).__name__ for value in model.state_dict().values()}
    results["moments"] = {
        type(m.to_local()).__name__ for s in optimizer.state.values() for m in s.values() if m.ndim
    }
    results["travels"] = {row.name: row.reason for row in table[0].weights if row.travels} if first else {}
    results["stays"] = {row.name: row.reason for row in table[0].weights if not row.travels} if first else {}
    (report,) = mxcompile.reports()
    results["report"], results["summary"] = str(report), report.summary
    return results


def both(way: Callable[..., Any]) -> list[dict[str, Any]]:
    return [train(way, first) for first in (True, False)]


def launch(ways: list[Callable[..., Any]], ranks: int, folder: Path) -> list[dict[str, Any]]:
    return on_ranks(ranks, folder, results_of, both, ways)
