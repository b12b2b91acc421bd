"""Encoders of text and of sequences like it, with the heads they are trained under.

The transform in front of a masked-language head and a pooler work on what is no token stream any more: BF16.
"""

from __future__ import annotations

from typing import Any

from animal import Animal

from animals.build import SIZES, about_animal, hf, ids, image
from animals.decoders import QKV

FEED_FORWARD = {r"intermediate\.dense": "ffn_in", r"layer\.\d+\.output\.dense": "ffn_out"}
OUTPUTS = {r"attention\.output\.dense": "attn_out", **FEED_FORWARD}
BERT_LAYER = {"query|key|value": "qkv", **OUTPUTS}
MASKED = {r"transform\.dense|lm_head\.dense": "bf16", r"predictions\.decoder|lm_head\.decoder": "head"}
POSITIONS = {"max_position_embeddings": 61}


def encoder(name: str, model: str, expect: dict[str, str], **settings: Any) -> Animal:
    """An encoder of transformers."""
    about = about_animal(settings, attentions=("sdpa", "eager"))
    return Animal(name=name, make=hf(model, **settings), expect=expect, **about)


def speech(samples: int = 2000):
    """A waveform."""
    return {"input_values": image(2, samples)}


SPEECH_CONVOLUTIONS = {"conv_dim": (24, 40), "conv_kernel": (10, 3), "conv_stride": (5, 4)}
SPEECH = {
    "hidden_size": 96, "intermediate_size": 208, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 9, "num_conv_pos_embedding_groups": 4, "vocab_size": 37,
    "mask_time_prob": 0.0, "layerdrop": 0.0, **SPEECH_CONVOLUTIONS,
}  # fmt: skip
WAV2VEC = {
    **QKV, r"attention\.out_proj": "attn_out", "intermediate_dense": "ffn_in", "output_dense": "ffn_out",
    r"feature_projection(\.projection)?": "embedding|other", "lm_head": "head",
}  # fmt: skip

ENCODERS = (
    encoder("bert", "BertForMaskedLM", {**BERT_LAYER, **MASKED}, **SIZES),
    encoder("bert_classifier", "BertForSequenceClassification", {**BERT_LAYER, r"pooler\.dense": "bf16", "classifier": "head"}, **SIZES, num_labels=7),
    encoder("bert_tagger", "BertForTokenClassification", {**BERT_LAYER, "classifier": "head"}, **SIZES, num_labels=7),
    encoder("roberta", "RobertaForMaskedLM", {**BERT_LAYER, **MASKED}, **SIZES),
    encoder("distilbert", "DistilBertForMaskedLM",
            {"q_lin|k_lin|v_lin": "qkv", "out_lin": "attn_out", "lin1": "ffn_in", "lin2": "ffn_out", "vocab_transform": "bf16", "vocab_projector": "head"},
            dim=96, hidden_dim=208, n_layers=2, n_heads=6, vocab_size=517),
    encoder("albert", "AlbertForMaskedLM",
            {"embedding_hidden_mapping_in": "embedding", "query|key|value": "qkv", r"attention\.dense": "attn_out", "ffn": "ffn_in", "ffn_output": "ffn_out",
             r"predictions\.dense": "bf16", r"predictions\.decoder": "head"},
            **SIZES, embedding_size=40),
    encoder("electra", "ElectraForMaskedLM", {"embeddings_project": "embedding", **BERT_LAYER, r"generator_predictions\.dense": "bf16", "generator_lm_head": "head"}, **SIZES, embedding_size=40),
    encoder("electra_discriminator", "ElectraForPreTraining", {"embeddings_project": "embedding", **BERT_LAYER, r"discriminator_predictions\.dense": "bf16", r"discriminator_predictions\.dense_prediction": "head"}, **SIZES, embedding_size=40),
    encoder("rembert", "RemBertForMaskedLM", {"embedding_hidden_mapping_in": "embedding", **BERT_LAYER, r"predictions\.dense": "bf16", r"predictions\.decoder": "head"}, **SIZES, input_embedding_size=40, output_embedding_size=56, attentions=("eager",)),
    encoder("deberta", "DebertaForMaskedLM", {"in_proj": "qkv", "pos_proj|pos_q_proj": "qkv|bf16", **OUTPUTS, **MASKED}, **SIZES, relative_attention=True, pos_att_type=["c2p", "p2c"], attentions=("eager",)),
    encoder("deberta_v2", "DebertaV2ForMaskedLM", {"query_proj|key_proj|value_proj": "qkv", "pos_key_proj|pos_query_proj": "qkv|bf16", **OUTPUTS, **MASKED}, **SIZES, relative_attention=True, pos_att_type=["c2p", "p2c"], attentions=("eager",)),
    encoder("modernbert", "ModernBertForMaskedLM", {"Wqkv": "qkv", r"attn\.Wo": "attn_out", r"mlp\.Wi": "ffn_in", r"mlp\.Wo": "ffn_out", r"head\.dense": "bf16", "decoder": "head"}, **SIZES, pad_token_id=0, local_attention=7),
    encoder("mpnet", "MPNetForMaskedLM", {r"attn\.[qkv]": "qkv", r"attn\.o": "attn_out", **FEED_FORWARD, **MASKED}, **SIZES, attentions=("eager",)),
    encoder("roformer", "RoFormerForMaskedLM", {**BERT_LAYER, **MASKED}, **SIZES, embedding_size=96, attentions=("eager",)),
    encoder("convbert", "ConvBertForMaskedLM", {r"attention\.self": "bf16", "conv_kernel_layer|conv_out_layer": "qkv|bf16", r"key_conv_attn_layer\.pointwise": "qkv|bf16", **BERT_LAYER, r"generator_predictions\.dense": "bf16", "generator_lm_head": "head"}, **SIZES, embedding_size=96, attentions=("eager",)),
    encoder("fnet", "FNetForMaskedLM", {r"intermediate\.dense": "ffn_in", r"output\.dense": "ffn_out", r"embeddings\.projection": "embedding|other", **MASKED}, hidden_size=96, intermediate_size=208, num_hidden_layers=2, vocab_size=517, attentions=("eager",), bf16=False, dead=r"pooler\.dense"),
    encoder("longformer", "LongformerForMaskedLM", {"?query_global|key_global|value_global": "qkv", **BERT_LAYER, **MASKED}, **SIZES, attention_window=8, attentions=("eager",)),
    encoder("esm", "EsmForMaskedLM", {**BERT_LAYER, **MASKED}, **{**SIZES, "vocab_size": 33}, pad_token_id=1, mask_token_id=32, position_embedding_type="rotary", inputs=lambda: {"input_ids": ids(vocab=30)}),
    encoder("layoutlm", "LayoutLMForMaskedLM", {**BERT_LAYER, **MASKED}, **SIZES, attentions=("eager",), dead=r"pooler\.dense"),
    encoder("wav2vec2", "Wav2Vec2ForCTC", WAV2VEC, inputs=speech, **SPEECH),
    encoder("hubert", "HubertForCTC", WAV2VEC, inputs=speech, **SPEECH),
    encoder("wavlm", "WavLMForCTC", {**WAV2VEC, "gru_rel_pos_linear": "conditioning|qkv|bf16"}, inputs=speech, **SPEECH, attentions=("eager",)),
    encoder("sew", "SEWForCTC", {**WAV2VEC, r"upsample\.projection": "bf16|mx"}, inputs=speech, **SPEECH, squeeze_factor=2),
    encoder("ast", "ASTForAudioClassification", {**QKV, "o_proj": "attn_out", "fc1": "ffn_in", "fc2": "ffn_out", r"classifier\.dense": "head"},
            inputs=lambda: {"input_values": image(2, 40, 24)}, hidden_size=96, intermediate_size=208, num_hidden_layers=2, num_attention_heads=6, patch_size=8, frequency_stride=5, time_stride=5, max_length=40, num_mel_bins=24, num_labels=7),
    encoder("decision_transformer", "DecisionTransformerModel",
            {r"attn\.c_attn": "qkv", r"attn\.c_proj": "attn_out", r"mlp\.c_fc": "ffn_in", r"mlp\.c_proj": "ffn_out", "embed_return|embed_state|embed_action": "embedding|other", r"predict_\w+(\.\d+)?": "head"},
            inputs=lambda: {"states": image(2, 9, 11), "actions": image(2, 9, 5), "rewards": image(2, 9, 1), "returns_to_go": image(2, 9, 1), "timesteps": ids(2, 9, 20), "attention_mask": ids(2, 9, 20) * 0 + 1},
            state_dim=11, act_dim=5, hidden_size=96, n_head=6, n_layer=2, n_inner=208, max_ep_len=61),
)  # fmt: skip
