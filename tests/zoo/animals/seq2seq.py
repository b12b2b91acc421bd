"""Encoders with decoders: of text, of speech. Cross-attention reads the encoder: its k and v are projections too."""

from __future__ import annotations

from typing import Any

from animal import Animal

from animals.build import about_animal, hf, ids, image
from animals.decoders import FC, HEAD, QKV
from animals.experts import EXPERTS

BART = {**QKV, "out_proj": "attn_out", **FC, **HEAD}
T5 = {
    r"\w*Attention\.[qkv]": "qkv", r"\w*Attention\.o": "attn_out", r"wi|wi_0|wi_1": "ffn_in", r"wo": "ffn_out",
    **HEAD,
}  # fmt: skip
BART_SIZES = {
    "d_model": 96, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 6, "decoder_attention_heads": 6,
    "encoder_ffn_dim": 208, "decoder_ffn_dim": 176, "vocab_size": 517, "max_position_embeddings": 61,
}  # fmt: skip
T5_SIZES = {"d_model": 96, "d_kv": 12, "d_ff": 208, "num_layers": 2, "num_heads": 6, "vocab_size": 517}


def both() -> dict[str, Any]:
    """Text in, text out."""
    return {"input_ids": ids(), "decoder_input_ids": ids(2, 13)}


def seq2seq(name: str, model: str, expect: dict[str, str], inputs=both, **settings: Any) -> Animal:
    """An encoder with a decoder, of transformers."""
    about = about_animal(settings, attentions=("sdpa", "eager"))
    return Animal(name=name, make=hf(model, inputs, **settings), expect=expect, **about)


def speech():
    """A spectrogram in, text out."""
    return {"input_features": image(2, 20, 48), "decoder_input_ids": ids(2, 13)}


SEQ2SEQ = (
    seq2seq("t5", "T5ForConditionalGeneration", T5, **T5_SIZES, attentions=("eager",)),
    seq2seq("t5_gated", "T5ForConditionalGeneration", T5, **T5_SIZES, feed_forward_proj="gated-gelu", tie_word_embeddings=False, attentions=("eager",)),
    seq2seq("umt5", "UMT5ForConditionalGeneration", T5, **T5_SIZES, attentions=("eager",)),
    seq2seq("longt5", "LongT5ForConditionalGeneration", T5, **T5_SIZES, local_radius=7, attentions=("eager",)),
    seq2seq("switch", "SwitchTransformersForConditionalGeneration", {"router.classifier": "router", **EXPERTS, r"?experts\.expert_\d+\.wi": "expert_in", r"?experts\.expert_\d+\.wo": "expert_out", **T5}, **T5_SIZES, num_decoder_layers=2, num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, attentions=("eager",)),
    seq2seq("bart", "BartForConditionalGeneration", BART, **BART_SIZES),
    seq2seq("bart_classifier", "BartForSequenceClassification", {**QKV, r"\w*attn\.out_proj": "attn_out", **FC, r"classification_head\.dense": "bf16", r"classification_head\.out_proj": "head"}, lambda: {"input_ids": _with_eos()}, **BART_SIZES, num_labels=7),
    seq2seq("mbart", "MBartForConditionalGeneration", BART, **BART_SIZES),
    seq2seq("pegasus", "PegasusForConditionalGeneration", BART, **BART_SIZES),
    seq2seq("marian", "MarianMTModel", BART, **BART_SIZES, pad_token_id=0, decoder_start_token_id=0),
    seq2seq("blenderbot", "BlenderbotForConditionalGeneration", BART, **BART_SIZES),
    seq2seq("m2m_100", "M2M100ForConditionalGeneration", BART, **BART_SIZES),
    seq2seq("led", "LEDForConditionalGeneration", {"query_global|key_global|value_global|query|key|value": "qkv", r"self_attn\.output": "attn_out", **BART}, **{k: v for k, v in BART_SIZES.items() if k != "max_position_embeddings"}, max_encoder_position_embeddings=64, max_decoder_position_embeddings=61, attention_window=8, attentions=("eager",)),
    seq2seq("fsmt", "FSMTForConditionalGeneration", {**QKV, "out_proj": "attn_out", **FC, "output_projection": "head"}, **{k: v for k, v in BART_SIZES.items() if k != "vocab_size"}, langs=["en", "de"], src_vocab_size=517, tgt_vocab_size=523, attentions=("eager",)),
    seq2seq("prophetnet", "ProphetNetForConditionalGeneration", {"query_proj|key_proj|value_proj": "qkv", "out_proj": "attn_out", r"feed_forward\.intermediate": "ffn_in", r"feed_forward\.output": "ffn_out", "relative_pos_embeddings": "qkv|bf16", **HEAD}, hidden_size=96, encoder_ffn_dim=208, decoder_ffn_dim=176, num_encoder_layers=2, num_decoder_layers=2, num_encoder_attention_heads=6, num_decoder_attention_heads=6, vocab_size=517, max_position_embeddings=61, attentions=("eager",)),
    seq2seq("whisper", "WhisperForConditionalGeneration", {**QKV, "out_proj": "attn_out", **FC, "proj_out": "head"}, speech, **{k: v for k, v in BART_SIZES.items() if k != "max_position_embeddings"}, num_mel_bins=20, max_source_positions=24, max_target_positions=61, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1),
    seq2seq("moonshine", "MoonshineForConditionalGeneration", {**QKV, "o_proj": "attn_out", **FC, "proj_out": "head"}, lambda: {"input_values": image(2, 4000), "decoder_input_ids": ids(2, 13)}, hidden_size=96, intermediate_size=208, encoder_num_hidden_layers=2, decoder_num_hidden_layers=2, encoder_num_attention_heads=6, decoder_num_attention_heads=6, vocab_size=517, pad_token_id=0),
    seq2seq("speech_to_text", "Speech2TextForConditionalGeneration", BART, lambda: {"input_features": image(2, 48, 20), "decoder_input_ids": ids(2, 13)}, **{k: v for k, v in BART_SIZES.items() if k != "max_position_embeddings"}, input_feat_per_channel=20, conv_channels=40, max_source_positions=61, max_target_positions=61, attentions=("eager",)),
)  # fmt: skip


def _with_eos():
    tokens = ids()
    tokens[:, -1] = 2
    return tokens
