"""`saved: mxfp8`: what backward reads of a kept activation, against casts of our own, and its bytes.

The reference is the same model compiled without the option, under hooks of autograd that replace saved
tensors by the value of a cast of their own. Everything backward gives has to be equal, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.eager_backend import EagerBackend
from helpers.made import Made
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mxcompile
from mxcompile.graph.attention import ATTENTION_FORWARD
from mxcompile.graph.opsets import packet

WIDTH, HEADS, HIDDEN = 64, 2, 176
POINTWISE = ["qkv", "ffn_in", "ffn_out"]
WITH_ATTENTION = [*POINTWISE, "attn_out"]


def policy(roles: list[str], **use: Any) -> dict[str, Any]:
    return {"version": 1, "rules": [{"match": {"role": roles}, "use": {"saved": "mxfp8", **use}}]}


class Block(nn.Module):
    """A Llama's: RMSNorm, causal attention, SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2)

        n = self.a(x)
        y = F.scaled_dot_product_attention(
            heads(self.q(n)), heads(self.k(n)), heads(self.v(n)), is_causal=True
        )
        x = x + self.o(y.transpose(1, 2).flatten(2))
        n = self.b(x)
        return x + self.down(F.silu(self.gate(n)) * self.up(n))


class Model(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 50)
        self.recompute = recompute

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), tokens.flatten())


def model(recompute: bool = False, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return Model(recompute).to(dtype)


def tokens(*shape: int) -> Tensor:
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(1))


class Run:
    """A step for each of `batches`: its gradients, what it saved, and the report."""

    def __init__(self, subject: nn.Module, *batches: Tensor, **how: Any) -> None:
        torch._dynamo.reset()
        mxcompile.clear_reports()
        self.cast: Callable[[fx.Node, Tensor], Tensor] = how.pop("cast", lambda _, tensor: tensor)
        autocast = how.pop("autocast", False)
        self.backend = EagerBackend(policy=how.pop("policy"))
        self.compiled = torch.compile(subject, backend=self.backend, fullgraph=True, **how)
        self.subject, self.autocast = subject, autocast
        self.gradients: dict[str, Tensor] = {}
        self.saved_bytes: list[int] = []
        for number, batch in enumerate(batches):
            self.step(number, batch)
        (self.report,) = mxcompile.reports()
        assert len(self.backend.graphs) == 2, "compiled again"

    def step(self, number: int, x: Tensor) -> None:
        input_pointers = {t.untyped_storage().data_ptr() for t in [x, *self.subject.parameters()]}
        self.subject.zero_grad(set_to_none=True)
        self.saved_bytes.append(0)
        turn = iter(range(1000))

        def pack(tensor: Tensor) -> Tensor:
            node = self.saved[next(turn)]
            if tensor.untyped_storage().data_ptr() in input_pointers:
                return tensor
            self.saved_bytes[-1] += tensor.numel() * tensor.element_size()
            return self.cast(node, tensor)

        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16, enabled=self.autocast),
        ):
            loss = self.compiled(x)
        loss.backward()
        for name, parameter in self.subject.named_parameters():
            if parameter.grad is not None:
                self.gradients[f"{name}, batch {number}"] = parameter.grad

    @property
    def saved(self) -> list[fx.Node]:
        (output,) = self.backend.graphs[0].graph.find_nodes(op="output")
        return [n for n in output.args[0][1:] if isinstance(n.meta.get("val"), Tensor)]


def own_cast(tensor: Tensor, attention_result: bool) -> Tensor:
    """The value of an MX copy: of blocks along the innermost dimension in memory.

    Of attention's result, which a GEMM reads as [tokens, features], blocks are of tokens.
    """
    if attention_result:
        batch, heads, length, width = tensor.shape
        rows = tensor.transpose(1, 2).reshape(batch * length, heads * width)
        value = mxcompile.quantize(rows, block_dim=-2).dequantize(tensor.dtype)
        return value.view(batch, length, heads, width).transpose(1, 2)
    order = sorted(range(tensor.ndim), key=lambda dim: -tensor.stride(dim))
    value = mxcompile.quantize(tensor.permute(order).contiguous()).dequantize(tensor.dtype)
    return value.permute(sorted(range(tensor.ndim), key=order.__getitem__))


def is_attention_result(node: fx.Node) -> bool:
    while packet(node) in (torch.ops.aten.alias, torch.ops.aten.transpose, torch.ops.aten.permute):
        node = node.args[0]
    return node.args[1:] == (0,) and packet(node.args[0]) in ATTENTION_FORWARD


def frozen(subject: nn.Module) -> nn.Module:
    for name, parameter in subject.named_parameters():
        parameter.requires_grad_("layers.1" in name or "norm" in name)
    return subject


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "plain": (model, {}),
    "dynamic": (model, {"dynamic": True}),
    "checkpointing": (lambda: model(recompute=True), {}),
    "autocast": (lambda: model(dtype=torch.float32), {"autocast": True}),
    "fp32": (lambda: model(dtype=torch.float32), {}),
    "frozen": (lambda: frozen(model()), {}),
}


SLOW = [pytest.param(case, WITH_ATTENTION, marks=pytest.mark.slow) for case in CASES if case != "plain"]


@pytest.mark.parametrize(("case", "roles"), [("plain", POINTWISE), ("plain", WITH_ATTENTION), *SLOW])
def test_backward_reads_the_values_of_mx_copies(case: str, roles: list[str]):
    build, how = CASES[case]
    batches = [tokens(2, 48), tokens(3, 20)] if "dynamic" in how else [tokens(2, 48)]
    compressed = Run(build(), *batches, policy=policy(roles), **how)
    names = {node.name for node in compressed.saved}
    cast: list[str] = []

    def reference(node: fx.Node, tensor: Tensor) -> Tensor:
        if node.name in names:
            return tensor
        cast.append(node.name)
        return own_cast(tensor, is_attention_result(node))

    plain = Run(build(), *batches, policy="nvidia", cast=reference, **how)
    assert cast
    assert compressed.gradients.keys() == plain.gradients.keys()
    for name, gradient in compressed.gradients.items():
        assert torch.equal(gradient, plain.gradients[name]), name
    assert compressed.report.summary.saved_bytes == compressed.saved_bytes[0] < plain.saved_bytes[0]
    untouched = Run(build(), *batches, policy="nvidia", **how)
    assert any(not torch.equal(g, compressed.gradients[n]) for n, g in untouched.gradients.items())


class Blocks(Made, layers=lambda: nn.ModuleList(Block() for _ in range(4))):
    """What the bytes of a block are counted on: no logits beside them."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


@pytest.mark.parametrize(
    ("roles", "limit"), [(POINTWISE, 0.70), pytest.param(WITH_ATTENTION, 0.56, marks=pytest.mark.slow)]
)
def test_bytes_of_a_swiglu_block(roles: list[str], limit: float):
    x = torch.randn(2, 64, WIDTH).bfloat16()
    torch.manual_seed(0)
    subject = Blocks().bfloat16()
    kept = {
        name: Run(subject, x, policy=rules).saved_bytes[0]
        for name, rules in {"bf16": "bf16", "default": "nvidia", "compressed": policy(roles)}.items()
    }
    assert kept["compressed"] <= limit * kept["bf16"]
    assert kept["compressed"] < kept["default"] < kept["bf16"]


class Written(nn.Module):
    """Attention in its own operations, with a mask of infinities."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).mT / WIDTH**0.5
        mask = torch.full(scores.shape[-2:], float("-inf")).triu(1)
        return x + self.o((scores.float() + mask).softmax(-1).to(x.dtype) @ self.v(x))


def test_inputs_of_an_exponential_are_saved_unquantized():
    """Of a written-out attention scores, mask and statistics; its weights, q, k and v are copies."""
    subject = nn.Sequential(Written(), Written()).bfloat16()
    x = torch.randn(2, 64, WIDTH).bfloat16()

    def loss(x: Tensor) -> Tensor:
        return subject(x).float().square().mean()

    torch._dynamo.reset()
    backend = EagerBackend(policy=policy(WITH_ATTENTION))
    torch.compile(loss, backend=backend, fullgraph=True)(x).backward()
    forward = backend.graphs[0].graph
    (output,) = forward.find_nodes(op="output")
    saved = [node for node in output.args[0][1:] if node.op == "call_function"]
    scores = [node for node in saved if packet(node) is torch.ops.aten.bmm]
    assert scores, "backward computes the softmax again"
    assert {tag.role for node in scores for tag in node.meta["mx"]} == {"attn_scores"}
    assert {torch.ops.aten.amax, torch.ops.aten.sum} <= {packet(node) for node in saved}
    casts = forward.find_nodes(op="call_function", target=torch.ops.mx.cast.default)
    copies = [node for node in casts if node.meta["mx_pass"] == "compress"]
    assert len(copies) >= 6
    assert not {node.args[0] for node in copies} & set(scores)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in subject.parameters())


def test_weight_gradient_of_bf16_layer_is_equal_under_saved_mxfp8():
    subject, x = Blocks().bfloat16(), torch.randn(2, 64, WIDTH).bfloat16()
    kept = {"match": {"name": "*.up"}, "use": "bf16"}
    how = [{"match": {"role": "ffn_in"}, "use": {"saved": saved}} for saved in ("bf16", "mxfp8")]
    plain, compressed = (Run(subject, x, policy={"version": 1, "rules": [kept, rule]}) for rule in how)
    assert compressed.saved_bytes[0] < plain.saved_bytes[0]
    name = "layers.3.up.weight, batch 0"
    assert torch.equal(plain.gradients[name], compressed.gradients[name])


@pytest.mark.slow
def test_a_rule_reaches_its_own_layers_alone():
    subject, x = Blocks().bfloat16(), torch.randn(2, 64, WIDTH).bfloat16()
    saved = {}
    for name in ("layers.0.*", "layers.3.*", "*"):
        rule = {"match": {"name": name}, "use": {"saved": "mxfp8"}}
        saved[name] = Run(subject, x, policy={"version": 1, "rules": [rule]}).saved_bytes[0]
    default = Run(subject, x, policy="nvidia").saved_bytes[0]
    assert saved["*"] < saved["layers.3.*"] < default
    assert 0.15 < (default - saved["layers.3.*"]) / (default - saved["*"]) < 0.35


@pytest.mark.slow
def test_compiled_by_inductor_it_is_the_same():
    """Through code generation: against hooks around the code that is generated without the option."""
    subject, x = model(), tokens(2, 48)
    gradients = {}
    for rules in ("nvidia", policy(POINTWISE)):
        torch._dynamo.reset()
        subject.zero_grad(set_to_none=True)
        torch.compile(subject, backend="mxfp8", options={"policy": rules})(x).backward()
        gradients[str(rules)] = torch.cat([p.grad.flatten().float() for p in subject.parameters()])
    eager = Run(model(), x, policy=policy(POINTWISE))
    expected = torch.cat(
        [eager.gradients[f"{n}, batch 0"].flatten().float() for n, _ in subject.named_parameters()]
    )
    default, compiled = gradients.values()
    assert not torch.equal(default, compiled)
    assert (compiled - expected).norm() < 0.03 * expected.norm()
