"""The repeated blocks of models: which there are, and that every way to decide sees the same ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from helpers.blocks import FeedForward
from helpers.fresh import forget
from helpers.made import Made
from helpers.reports import report_of
from torch import nn

import mxcompile
from mxcompile.models.blocks import Blocks


def places(model: nn.Module) -> dict[str, tuple[int, int]]:
    return {path: tuple(block) for path, block in Blocks.from_model(model).places.items()}


def stack(path: str, count: int, dot: str = ".") -> dict[str, tuple[int, int]]:
    return {f"{path}{dot}{i}".lstrip("."): (i, count) for i in range(count)}


def block(width: int = 32) -> nn.Module:
    return FeedForward(width, 64)


def mixture(experts: int) -> nn.Module:
    return Made(
        router=nn.Linear(32, experts) if experts else None,
        experts=nn.ModuleList(block() for _ in range(experts)),
        dense=None if experts else block(),
    )


class Model(nn.Module):
    """Embedding in front, a stack of blocks, head behind."""

    def __init__(self, depth: int = 5):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(32, 50, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def wrapped(module: nn.Module) -> nn.Module:
    return Made(_checkpoint_wrapped_module=module)


def matrices() -> nn.Module:
    return Made(w1=nn.Parameter(torch.ones(4, 4)), w2=nn.Parameter(torch.ones(4, 4)))


MADE: dict[str, tuple[Any, dict[str, tuple[int, int]]]] = {
    "a module list": (lambda: Model(3), stack("layers", 3)),
    "a list of one": (lambda: Model(1), stack("layers", 1)),
    "blocks and all else in one Sequential": (
        lambda: nn.Sequential(nn.Embedding(8, 32), block(), block(), nn.Sequential(nn.Linear(32, 8))),
        {"1": (0, 2), "2": (1, 2)},
    ),
    "layers that are no blocks": (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), {}),
    "matrices without modules": (lambda: nn.ModuleList([matrices(), matrices()]), stack("", 2)),
    "parts that differ": (lambda: nn.ModuleList([block(), nn.Sequential(nn.Linear(4, 4))]), {}),
    "numbered names": (lambda: nn.ModuleDict({f"layer{i}": block() for i in (0, 1)}), stack("layer", 2, "")),
    "named parts": (lambda: nn.ModuleDict({"actor": block(), "critic": block()}), {}),
    "a dense layer before experts": (
        lambda: nn.ModuleDict({"layers": nn.ModuleList(map(mixture, (0, 4, 4)))}),
        stack("layers", 3),
    ),
    "stages": (
        lambda: nn.ModuleList(
            nn.ModuleDict({"blocks": nn.ModuleList([block(w), block(w)])}) for w in (16, 32)
        ),
        stack("0.blocks", 2) | stack("1.blocks", 2),
    ),
    "widths that differ": (lambda: nn.ModuleList(block(w) for w in (16, 32, 48)), stack("", 3)),
    "every second wrapped": (
        lambda: nn.ModuleList(wrapped(block()) if i % 2 else block() for i in range(4)),
        stack("", 4),
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_repeated_members_of_lists_are_blocks(name: str):
    make, expected = MADE[name]
    assert places(make()) == expected


def test_a_wrapper_around_a_stack_leaves_names_alone():
    assert places(wrapped(Model(2))) == stack("layers", 2)
    assert Blocks.from_model(wrapped(Model(2))).position("layers.1.up") == (1, 2)
    assert Blocks.from_model(Model(2)).position("head") is None


TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
CONFIGS = {
    "llama": (transformers.LlamaConfig(**TINY, vocab_size=64), stack("layers", 3)),
    "gpt2": (transformers.GPT2Config(n_embd=32, n_layer=3, n_head=2, vocab_size=64), stack("h", 3)),
    "t5": (
        transformers.T5Config(d_model=32, d_ff=64, num_layers=2, num_decoder_layers=3, num_heads=2),
        stack("encoder.block", 2) | stack("decoder.block", 3),
    ),
    "deepseek": (
        transformers.DeepseekV3Config(**TINY, vocab_size=64, first_k_dense_replace=1, n_routed_experts=8,
                                      moe_intermediate_size=16, n_group=2, topk_group=1),
        stack("layers", 3),
    ),
    "swin": (
        transformers.SwinConfig(embed_dim=16, depths=[2, 3], num_heads=[2, 2], image_size=32, patch_size=4),
        stack("encoder.layers.0.blocks", 2) | stack("encoder.layers.1.blocks", 3),
    ),
    "vit": (transformers.ViTConfig(**TINY, image_size=32, patch_size=8), 3),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_the_blocks_of_real_models(name: str):
    config, expected = CONFIGS[name]
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    block_places = places(model)
    if isinstance(expected, int):
        assert {*block_places.values()} == {(i, expected) for i in range(expected)}
    else:
        assert block_places == expected


ENDS = {"version": 1, "rules": [{"match": {"blocks": {"first": 2, "last": 1}}, "use": "bf16"}]}


def decided(report: mxcompile.Report) -> dict[str, tuple[str, str]]:
    return {g.name: (g.precision, g.reason) for g in report.gemms if g.gemm == "fprop"}


def test_first_and_last_blocks_in_explain_and_in_a_compile():
    model, ids = Model(), torch.randint(0, 50, (2, 8))
    explained = mxcompile.explain(model, ids, policy=ENDS)
    assert {name: why for name, (_, why) in decided(explained).items()} == {
        f"layers.{i}.{part}": "policy: rule 1" if i in (0, 1, 4) else f"preset nvidia: role {role}"
        for i in range(5)
        for part, role in (("up", "ffn_in"), ("down", "ffn_out"))
    } | {"head": "role head"}
    report = report_of(model, ids, policy=ENDS)
    assert decided(report) == decided(explained)
    assert {g.name: g.block for g in report.gemms}["layers.3.up"] == (3, 5)
    assert {g.block for g in report.gemms if g.name == "head"} == {None}
    assert mxcompile.Report.from_json(report.to_json()) == report


def test_layers_left_out_of_a_trace_keep_their_place():
    with torch.device("meta"):
        model = Model(40)
    policy = {"version": 1, "rules": [{"match": {"blocks": {"first": 3, "last": 2}}, "use": "bf16"}]}
    report = mxcompile.explain(model, torch.zeros(2, 8, dtype=torch.long, device="meta"), policy=policy)
    kept = {g.block for g in report.gemms if g.reason == "policy: rule 1"}
    assert kept == {(i, 40) for i in (0, 1, 2, 38, 39)}
    assert {g.block for g in report.gemms if g.block} == {(i, 40) for i in range(40)}


def test_blocks_compiled_one_by_one_know_their_place():
    model = Model()
    backends = [mxcompile.Backend(root=model, block=layer, policy=ENDS) for layer in model.layers]
    assert backends[0] == backends[1] == backends[4] != backends[2] == backends[3]


def test_a_compile_of_another_depth_has_its_own_code():
    ids = torch.randint(0, 50, (2, 8))
    policy = {"version": 1, "rules": [{"match": {"blocks": {"last": 1}}, "use": "bf16"}]}
    for depth in (2, 3):
        forget()
        torch.compile(Model(depth), backend="mxfp8", options={"policy": policy})(ids)
        kept = {
            name for name, (precision, _) in decided(mxcompile.reports()[-1]).items() if precision == "bf16"
        }
        assert kept == {f"layers.{depth - 1}.up", f"layers.{depth - 1}.down", "head"}
