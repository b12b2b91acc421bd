"""Packages of AOTInductor: they generate what the model generates, without its Python code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import head_rule
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

import mxcompile
from mxcompile.checkpoint.packaged_model import digest
from mxcompile.errors import CheckpointError, ModelError, OptionError

ROOM, NEW = 40, 10
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention"]


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))


def turned() -> Any:
    """Weights that do not lie in order: by columns, stored by columns, parts of others, one row for all."""
    model = llama()
    block, attention = model.model.layers[0], model.model.layers[0].self_attn
    wide = torch.randn(200, 128).mul(0.1).t()
    codes = mxcompile.quantize(torch.randn(96, 64) * 0.1, block_dim=0, elem_dtype=torch.int8)
    changed = {
        model.model.embed_tokens: torch.randn(64, 96).t(),
        attention.q_proj: mxcompile.quantize(torch.randn(128, 128) * 0.1)[:, 64:],
        attention.k_proj: wide[:64, 100:164],
        attention.v_proj: torch.randn(64, 1).mul(0.1).expand(64, 64),
        block.mlp.down_proj: codes.t(),
        block.input_layernorm: torch.rand(128)[::2],
    }
    for layer, weight in changed.items():
        layer.weight = nn.Parameter(weight, requires_grad=False)
    return model


def gemma() -> Any:
    """A window that most of the tokens exceed, and a head that shares the embedding's weight."""
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, sliding_window=8, layer_types=LAYERS))


def stored(make: Any) -> Any:
    torch.manual_seed(0)
    model = make().eval()  # in FP32, so that two next tokens are no tie
    mxcompile.quantize_weights_(model, head_rule("mxint8", preset="mxint8"), progress=False)
    return model


def prompt(tokens: int) -> torch.Tensor:
    return torch.randint(96, (1, tokens), generator=torch.Generator().manual_seed(tokens))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch.export copies its own
@pytest.mark.parametrize("make", [gemma, turned])
def test_package_generates_the_tokens_of_the_model(make: Any, tmp_path: Path):
    model = stored(make)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    mxcompile.save_package(model, tmp_path / "served", max_cache_len=ROOM)
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    package = mxcompile.load_package(tmp_path / "served")
    for tokens in (1, 5, 25):  # a later prompt overwrites the cache
        ids = prompt(tokens)
        expected = model.generate(ids, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(package.generate(ids, NEW), expected)
        logits = model(ids).logits[:, -1]
        torch.testing.assert_close(package(ids), logits, rtol=0, atol=1e-3 * logits.abs().max().item())
    together, parts = package(prompt(9)), [package(prompt(9)[:, :4]), package(prompt(9)[:, 4:], 4)]
    torch.testing.assert_close(parts[1], together, rtol=1e-3, atol=1e-4)
    for strided in (prompt(18)[:, :9], prompt(18)[:, ::2], prompt(9).t().contiguous().t()):
        assert torch.equal(package(strided), package(strided.contiguous()))
    first = int(package.generate(prompt(5), 1)[0, -1])
    assert package.generate(prompt(5), NEW, eos_token_id=first).shape == (1, 6)
    assert package.generate(prompt(5), NEW, eos_token_id=[(first + 1) % 96, first]).shape == (1, 6)
    _check_threads(package)
    _check_errors(package, tmp_path / "served")
    script = f"""
import sys, mxcompile, torch
model = mxcompile.load_package({str(tmp_path / "served")!r})
tokens = model.generate(torch.tensor({prompt(5).tolist()}), {NEW})
assert tokens.tolist() == {package.generate(prompt(5), NEW).tolist()}
assert not {{"transformers", "torch._dynamo", "torch._inductor"}} & {{*sys.modules}}  # each takes a second
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch.export copies its own
@pytest.mark.parametrize(("preset", "precision"), [("mxint8", "mxint8"), ("inference", "mxfp8")])
def test_package_that_quantizes_activations_has_logits_of_the_compiled_model(
    preset: str, precision: str, tmp_path: Path
):
    torch.manual_seed(0)
    model = llama().eval()
    policy = head_rule(precision, preset)
    mxcompile.quantize_weights_(model, policy, progress=False)
    mxcompile.save_package(model, tmp_path / "served", max_cache_len=ROOM, quantize_activations=True)
    package = mxcompile.load_package(tmp_path / "served")
    compiled = torch.compile(model, backend="mxfp8", options={"policy": policy})
    for tokens in (1, 5, 25):
        ids = prompt(tokens)
        with torch.no_grad():
            logits, unquantized = compiled(ids).logits[:, -1], model(ids).logits[:, -1]
        error = (logits - unquantized).abs().max().item()
        torch.testing.assert_close(package(ids), logits, rtol=0, atol=0.05 * error)


def _check_threads(package: Any) -> None:
    """Threads of a server get the tokens that they get alone, though they share one cache."""
    prompts = [prompt(tokens) for tokens in (5, 9, 13, 17)]
    alone = [package.generate(ids, NEW) for ids in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda ids: package.generate(ids, NEW), prompts))
    assert all(map(torch.equal, together, alone))


def _check_errors(package: Any, folder: Path) -> None:
    """Calls out of bounds would write beyond the cache, and programs of other CPUs end the process."""
    with pytest.raises(OptionError, match=r"36 tokens from position 5 must lie within max_cache_len=40"):
        package(prompt(36), 5)
    with pytest.raises(OptionError, match=r"of shape \(1, tokens\), found torch.int64 of shape \(2, 3\)"):
        package(torch.zeros(2, 3, dtype=torch.int64))
    ids: Any
    for ids in ([[1, 2]], torch.tensor(5)):
        with pytest.raises(OptionError, match="input_ids must be"):
            package(ids)
    for request, message in ({"max_new_tokens": 37}, "41 tokens"), ({"max_new_tokens": -1}, "found -1"):
        with pytest.raises(OptionError, match=message):
            package.generate(prompt(5), **request)
    for token in (-1, 96):
        with pytest.raises(OptionError, match=rf"within 0 and 95, found {token} to {token}"):
            package(torch.full((1, 3), token))
    about = json.loads((folder / "package.json").read_text(encoding="utf-8"))
    changes: dict[str, dict[str, Any]] = {
        "compiled with torch 1.0 for another machine, and this is torch": {"torch": "1.0"},
        "this CPU lacks avx_of_2099": {"cpu": [*about["cpu"], "avx_of_2099"]},
        "the compute capability of the GPU is none, not 9.0": {"gpu": "9.0"},
        "written by another version of mxcompile": {"version": None, "cpu": "AMX BF16"},
        "a damaged package, with other bytes than save_package wrote": {"digest": "", "dtype": "float16"},
    }
    for message, change in changes.items():
        changed = {**about, **change}
        changed["digest"] = change.get("digest", digest(folder, changed))
        (folder / "package.json").write_text(json.dumps(changed), encoding="utf-8")
        with pytest.raises(CheckpointError, match=re.escape(message)):
            mxcompile.load_package(folder)
    (folder / "package.json").write_text(json.dumps(about), encoding="utf-8")
    for name in ("prompt.pt2", "model.safetensors"):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:64] + bytes([whole[64] ^ 1]) + whole[65:])
        with pytest.raises(CheckpointError, match="a damaged package"):
            mxcompile.load_package(folder)
        (folder / name).write_bytes(whole)


@pytest.mark.parametrize(
    ("model", "sizes", "error", "match"),
    [
        (nn.Linear(2, 2), {}, ModelError, "a Hugging Face model that generates, found Linear"),
        (
            MambaForCausalLM(MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1)).eval(),
            {},
            ModelError,
            "MambaForCausalLM has no static cache of keys and values alone",
        ),
        (llama(), {}, ModelError, r"in training mode: call model\.eval"),
        (None, {"max_cache_len": 1}, OptionError, "max_cache_len must be at least 2, found 1"),
        (None, {"batch_size": 0}, OptionError, "batch_size must be at least 1, found 0"),
    ],
    ids=["no language model", "state space", "training mode", "no room", "no sequence"],
)
def test_model_without_a_package_is_refused(
    model: Any, sizes: dict[str, int], error: type[Exception], match: str, tmp_path: Path
):
    with pytest.raises(error, match=match):
        mxcompile.save_package(model or llama().eval(), tmp_path / "out", **{"max_cache_len": 8, **sizes})
    assert not (tmp_path / "out").exists()


def test_folder_without_a_package_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"package\.json"):
        mxcompile.load_package(tmp_path)


def test_package_in_an_existing_folder_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="exists already"):
        mxcompile.save_package(llama(), tmp_path, max_cache_len=8)
