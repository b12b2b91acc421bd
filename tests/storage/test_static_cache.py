"""Caches of keys and values in MXFP8: what they hold and give, `generate` with them, what they refuse."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import small_models
import torch
from helpers.reference import round_trip
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from transformers import StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

import mxcompile
from mxcompile.errors import MXCompileError, OptionError
from mxcompile.formats import stored_form
from mxcompile.serving.cache import MXStaticLayer

PROMPT = torch.arange(2, 24)[None]
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
ROOM = 40


def llama() -> nn.Module:
    torch.manual_seed(0)
    return small_models.llama(hidden_size=128).requires_grad_(False)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=80, n_layer=2, n_head=2)
    return GPT2LMHeadModel(config).eval().requires_grad_(False)


class RoundTrip(StaticLayer):
    """A cache in the model's dtype of what the reference cast leaves of keys and values."""

    def update(self, key_states, value_states, *args, **kwargs):
        rows = (round_trip(x, 3).to(x.dtype) for x in (key_states, value_states))
        return super().update(*rows, *args, **kwargs)


def stored_cache(model: nn.Module) -> StaticCache:
    return mxcompile.static_cache(model, ROOM)


def reference_cache(model: nn.Module) -> StaticCache:
    cache = StaticCache(model.config, ROOM)
    cache.layers = [RoundTrip(max_cache_len=ROOM) for _ in cache.layers]
    return cache


@pytest.mark.parametrize("head_dim", [64, 80, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_cache_layer_returns_written_values_cast_once(head_dim: int, dtype: torch.dtype):
    layer, rows = MXStaticLayer(max_cache_len=9), torch.randn(2, 3, 7, head_dim).to(dtype)
    assert layer.keys is None
    assert layer.stored_bytes == 0
    with torch.no_grad():
        layer.update(rows[:, :, :5], -rows[:, :, :5])
        keys, values = layer.update(rows[:, :, 5:], -rows[:, :, 5:])
    expected = torch.cat([round_trip(rows, 3), torch.zeros(2, 3, 2, head_dim)], 2).to(dtype)
    for actual, wanted in ((keys, expected), (values, -expected), (layer.keys, keys), (layer.values, values)):
        assert actual.dtype is dtype
        assert torch.equal(actual, wanted)
    assert int(layer.get_seq_length()) == 7
    assert layer.stored_bytes == 2 * 2 * 3 * 9 * (head_dim + -(-head_dim // 32))


def test_a_layer_is_reset_reordered_and_moved():
    layer, rows = MXStaticLayer(max_cache_len=4), torch.randn(3, 1, 2, 32)
    with torch.no_grad():
        layer.update(rows, rows)
        before, address = layer.keys, layer.key_codes.data_ptr()
        layer.reorder_cache(torch.tensor([2, 2, 0]))
        assert torch.equal(layer.keys, before[[2, 2, 0]])
        assert layer.key_codes.data_ptr() == address  # compiled code has it
        layer.offload()
        layer.prefetch()
        assert torch.equal(layer.values, before[[2, 2, 0]])
        layer.reset()
        assert int(layer.get_seq_length()) == 0
        assert not layer.keys.any()
        layer.update(rows, rows)
    assert torch.equal(layer.keys, before)


def test_integer_cache_layer_returns_written_values_cast_once():
    """k/64 times a power of two, by numpy in FP64."""
    layer, rows = MXStaticLayer(max_cache_len=7, form=stored_form(torch.int8)), torch.randn(2, 3, 7, 64)
    with torch.no_grad():
        keys, values = layer.update(rows, -rows)
    blocks = rows.double().numpy().reshape(-1, 32)
    powers = 2.0 ** np.ceil(np.log2(np.abs(blocks).max(1, keepdims=True) / (127 / 64)))
    wanted = np.rint(blocks / powers * 64) / 64 * powers
    assert np.array_equal(keys.double().numpy().reshape(-1, 32), wanted)
    assert torch.equal(values, -keys)


def test_a_precision_in_which_no_keys_are_stored_is_an_error():
    with pytest.raises(OptionError, match=r"unknown precision 'mxfp4'.*mxfp8.*mxint8"):
        mxcompile.static_cache(llama(), ROOM, precision="mxfp4")


@pytest.mark.parametrize("precision", ["mxfp8", "mxint8"])
def test_quantized_cache_takes_half_the_bytes(precision: str):
    """33 of 64 where head_dim is whole blocks: the codes, and a byte for 32 of them."""
    model = llama()
    cache = mxcompile.static_cache(model, ROOM, precision=precision)
    assert cache.stored_bytes == 0
    with torch.no_grad():
        model(PROMPT, cache=cache)
        plain = StaticCache(model.config, ROOM)
        model(PROMPT, cache=plain)
    in_bf16 = sum(layer.keys.nbytes + layer.values.nbytes for layer in plain.layers)
    assert cache.stored_bytes / in_bf16 == 33 / 64 <= 0.52


@pytest.mark.parametrize("make", [llama, gpt2])
def test_generation_with_mx_cache_equals_the_reference_cache(make):
    model = make()
    tokens = model.generate(PROMPT, cache=mxcompile.static_cache(model, ROOM), **GREEDY)
    assert torch.equal(tokens, model.generate(PROMPT, cache=reference_cache(model), **GREEDY))


def by_length(tokens: Tensor, scores: Tensor) -> Tensor:
    """A logits processor that chooses tokens by their place: either of two equal logits may win."""
    chosen = torch.full_like(scores, -torch.inf)
    chosen[:, 7 * tokens.shape[1] % scores.shape[1]] = 0
    return chosen


@pytest.mark.slow
@pytest.mark.parametrize("make", [llama, gpt2])
def test_generate_with_mx_cache_equals_reference_compiled(make):
    """Prompts of two lengths; decode runs on the kernel in every layer, prefill says why it does not."""
    model, prompts = make(), PROMPT.repeat(2, 1)
    shorter = torch.ones_like(prompts)
    shorter[1, :9] = 0  # padded on the left
    options = {**GREEDY, "attention_mask": shorter, "output_logits": True, "return_dict_in_generate": True}
    options["logits_processor"] = [by_length]
    right = model.generate(prompts, cache=reference_cache(model), **options)
    mxcompile.clear_reports()
    model.forward = torch.compile(model.forward, backend="mxfp8", options={"policy": "bf16"})
    cache = mxcompile.static_cache(model, ROOM)
    generated = model.generate(prompts, cache=cache, disable_compile=True, **options)
    assert torch.equal(generated.sequences, right.sequences)
    generated, right = torch.stack(generated.logits).double(), torch.stack(right.logits).double()
    assert (generated - right).norm() / right.norm() < 0.02
    gemms = [gemm for report in mxcompile.reports() for gemm in report.gemms]
    attentions = [gemm for gemm in gemms if gemm.role in ("attn_scores", "attn_values")]
    assert {g.kernel for g in attentions if g.m == 1} == {"mx_attention C++ (keys and values mxfp8)"}
    assert sum(g.m == 1 for g in attentions) == 4
    prefill = {g.kernel.partition("; ")[2] for g in attentions if g.m > 1}
    assert prefill == {"keys and values dequantized: 22 queries, the kernel takes up to 16"}


@pytest.mark.parametrize("is_allocated", [True, False])
@pytest.mark.parametrize("make", [lambda model: StaticCache(model.config, ROOM), stored_cache])
def test_allocated_cache_has_one_graph_for_every_prompt(make, is_allocated: bool):
    """The call that allocates a cache is a graph of its own: a start then compiles three, not two."""
    model, counter = llama(), CompileCounter()
    cache = make(model)
    config = model.config
    if is_allocated:
        heads = config.num_key_value_heads
        cache.early_initialization(1, heads, config.head_dim, model.dtype, model.device)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend=counter)
    for _ in range(2):
        cache.reset()
        model.generate(PROMPT, cache=cache, disable_compile=True, **GREEDY)
    assert counter.frame_count == (2 if is_allocated else 3)


def test_layers_with_a_window_stay_as_they_are(caplog: pytest.LogCaptureFixture):
    from transformers import Gemma2Config

    config = Gemma2Config(
        num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=8
    )
    with caplog.at_level(logging.WARNING, "mxcompile"):
        cache = mxcompile.static_cache(config, ROOM)
    kinds = [type(layer) for layer in cache.layers]
    assert kinds == [StaticSlidingWindowLayer, MXStaticLayer] * 2
    assert cache.kept == dict.fromkeys((0, 2), "a layer with a sliding window stores the window alone")
    assert "2 of 4 layers keep their keys and values as they are: a layer with a sliding" in caplog.text


def test_static_cache_refuses_models_without_storable_layers():
    from transformers import MistralConfig

    with pytest.raises(MXCompileError, match=r"no layer of MistralConfig .* sliding window"):
        mxcompile.static_cache(MistralConfig(sliding_window=8), ROOM)
    with pytest.raises(MXCompileError, match="a Hugging Face model, found Linear"):
        mxcompile.static_cache(nn.Linear(2, 2), ROOM)
    with pytest.raises(MXCompileError, match="at least 1, found 0"):
        mxcompile.static_cache(llama(), 0)


def test_refuses_gradients_and_writes_past_it():
    layer, rows = MXStaticLayer(max_cache_len=4), torch.randn(1, 1, 2, 32, requires_grad=True)
    with pytest.raises(MXCompileError, match="no gradients"):
        layer.update(rows, rows)
    with pytest.raises(AttributeError, match="call `update` to write them"):
        layer.keys = rows
