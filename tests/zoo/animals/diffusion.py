"""Diffusion transformers and a UNet, of diffusers.

What is made of the time step, the guidance, the class or a pooled text modulates the stream: conditioning. What
takes latents or text states to the width of the stream is an embedding, what takes the stream back a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from animal import Animal, Build, Call

from animals.build import about_animal, image

QKV = {"to_q|to_k|to_v|add_q_proj|add_k_proj|add_v_proj": "qkv", r"to_out\.0|to_out|to_add_out": "attn_out"}
FF = {r"ff\w*\.net\.0\.proj": "ffn_in", r"ff\w*\.net\.2": "ffn_out"}
TIME = {
    r"(time\w*|guidance\w*|text|adaln_single\.emb|emb)\w*(\.emb)?(\.\w+_embedder)?\.linear_[12]": "conditioning",
    r"?norm\w*(\.emb\.timestep_embedder)?\.linear\w*|adaln_single\.linear": "conditioning",
}
TOKENS = "embedding|other"
"""What a projection of raw latents or text states is."""
TEXT = "bf16|mx"
"""A small network over text states, in front of the blocks: either is right."""


def diffusers(kind: str, inputs: Callable[[], dict[str, Any]], **settings: Any) -> Callable[[Build], Call]:
    """A maker of the model `kind` of diffusers."""

    def make(build: Build) -> Call:
        import diffusers as library

        return getattr(library, kind)(**settings), (), {**inputs(), "return_dict": False}

    return make


def diffusing(
    name: str, kind: str, expect: dict[str, str], inputs: Callable[[], dict[str, Any]], **settings: Any
) -> Animal:
    """A model of diffusers."""
    about = about_animal(settings)
    return Animal(name=name, make=diffusers(kind, inputs, **settings), expect=expect, **about)


def step(value: float = 7.0) -> torch.Tensor:
    """Time steps of a batch of two."""
    return torch.full((2,), value)


def _flux() -> dict[str, Any]:
    return {
        "hidden_states": image(2, 16, 20), "encoder_hidden_states": image(2, 7, 44), "pooled_projections": image(2, 28),
        "timestep": step(), "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(7, 3), "guidance": step(),
    }  # fmt: skip


def _video(channels: int, text: int) -> dict[str, Any]:
    return {
        "hidden_states": image(2, channels, 3, 8, 8),
        "encoder_hidden_states": image(2, 7, text),
        "timestep": step(),
    }


DIFFUSION = (
    diffusing("sd3", "SD3Transformer2DModel", {r"norm\w*\.linear": "conditioning", "context_embedder": TOKENS, "proj_out": "head", **TIME, **QKV, **FF},
              lambda: {"hidden_states": image(2, 4, 8, 8), "encoder_hidden_states": image(2, 7, 44), "pooled_projections": image(2, 28), "timestep": step()},
              sample_size=8, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=6, joint_attention_dim=44, caption_projection_dim=96, pooled_projection_dim=28, pos_embed_max_size=8),
    diffusing("flux", "FluxTransformer2DModel", {"x_embedder|context_embedder": TOKENS, r"single_transformer_blocks\.\d+\.proj_mlp": "ffn_in", r"single_transformer_blocks\.\d+\.proj_out": "attn_out|ffn_out", "proj_out": "head", **TIME, **QKV, **FF},
              _flux, in_channels=20, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=6, joint_attention_dim=44, pooled_projection_dim=28, guidance_embeds=True, axes_dims_rope=(4, 6, 6)),
    diffusing("chroma", "ChromaTransformer2DModel", {r"distilled_guidance_layer(\.\w+)*": "conditioning", "x_embedder|context_embedder": TOKENS, r"single_transformer_blocks\.\d+\.proj_mlp": "ffn_in", r"single_transformer_blocks\.\d+\.proj_out": "attn_out|ffn_out", "proj_out": "head", **QKV, **FF},
              lambda: {k: v for k, v in _flux().items() if k not in ("pooled_projections", "guidance")}, in_channels=20, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=6, joint_attention_dim=44, axes_dims_rope=(4, 6, 6), approximator_num_channels=32, approximator_hidden_dim=56, approximator_layers=2),
    diffusing("wan", "WanTransformer3DModel", {r"condition_embedder\.text_embedder\.linear_[12]": TEXT, r"condition_embedder\.time_\w+(\.\w+)?": "conditioning", "proj_out": "head", **QKV, **FF},
              lambda: _video(4, 44), num_attention_heads=6, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=44, freq_dim=36, ffn_dim=208, num_layers=2, rope_max_seq_len=32),
    diffusing("hunyuan_video", "HunyuanVideoTransformer3DModel",
              {r"context_embedder\.proj_in": TOKENS, r"context_embedder\.time_text_embed\.(\w+\.)?linear_[12]": "conditioning", r"norm_out\.linear": "conditioning", r"single_transformer_blocks\.\d+\.proj_mlp": "ffn_in", r"single_transformer_blocks\.\d+\.proj_out": "attn_out|ffn_out", "proj_out": "head", **TIME, **QKV, **FF},
              lambda: {**_video(4, 44), "encoder_attention_mask": torch.ones(2, 7), "pooled_projections": image(2, 28), "guidance": step(100.0)},
              in_channels=4, out_channels=4, num_attention_heads=6, attention_head_dim=16, num_layers=1, num_single_layers=2, num_refiner_layers=1, patch_size=2, patch_size_t=1, text_embed_dim=44, pooled_projection_dim=28, rope_axes_dim=(4, 6, 6)),
    diffusing("pixart", "PixArtTransformer2DModel", {r"caption_projection\.linear_[12]": TEXT, "proj_out": "head", **TIME, **QKV, **FF},
              lambda: {"hidden_states": image(2, 4, 8, 8), "encoder_hidden_states": image(2, 7, 44), "timestep": step(), "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
              num_attention_heads=6, attention_head_dim=16, num_layers=2, cross_attention_dim=96, sample_size=8, caption_channels=44, norm_num_groups=4),
    diffusing("ltx", "LTXVideoTransformer3DModel", {"proj_in": TOKENS, r"caption_projection\.linear_[12]": TEXT, r"time_embed\.(emb\.timestep_embedder\.)?linear(_[12])?": "conditioning", "proj_out": "head", **QKV, **FF},
              lambda: {"hidden_states": image(2, 24, 20), "encoder_hidden_states": image(2, 7, 44), "timestep": step()[:, None], "encoder_attention_mask": torch.ones(2, 7), "num_frames": 2, "height": 3, "width": 4},
              in_channels=20, out_channels=20, num_attention_heads=6, attention_head_dim=16, cross_attention_dim=96, num_layers=2, caption_channels=44),
    diffusing("dit", "DiTTransformer2DModel", {r"norm1\.(emb\.timestep_embedder\.)?linear(_[12])?": "conditioning", "proj_out_1": "conditioning", "proj_out_2": "head", **QKV, **FF},
              lambda: {"hidden_states": image(2, 4, 8, 8), "timestep": step().long(), "class_labels": step().long()},
              num_attention_heads=6, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=2, sample_size=8, num_embeds_ada_norm=50, norm_num_groups=4),
    diffusing("sana", "SanaTransformer2DModel", {r"caption_projection\.linear_[12]": TEXT, r"time_embed\.(emb\.timestep_embedder\.)?linear(_[12])?": "conditioning", "proj_out": "head", r"attn1\.(to_q|to_k|to_v)": "qkv|mixer_in", r"attn1\.to_out\.0": "attn_out|mixer_out", r"patch_embed\.proj": TOKENS, r"ff\.conv_inverted": "ffn_in", r"ff\.conv_point": "ffn_out", r"attn1": "bf16", **QKV},
              lambda: {"hidden_states": image(2, 8, 4, 4), "encoder_hidden_states": image(2, 7, 44), "timestep": step()},
              in_channels=8, out_channels=8, num_attention_heads=6, attention_head_dim=16, num_layers=2, num_cross_attention_heads=4, cross_attention_head_dim=24, cross_attention_dim=96, caption_channels=44, sample_size=4, mlp_ratio=2.5),
    diffusing("hidream", "HiDreamImageTransformer2DModel",
              {r"[tp]_embedder(\.\w+)*\.linear_[12]": "conditioning", r"x_embedder(\.\w+)*": TOKENS, r"caption_projection\.\d+\.linear": TOKENS, r"adaLN_modulation\.\d": "conditioning", r"ff_i\.gate": "router", "to_[qkv](_t)?": "qkv", "to_out(_t)?": "attn_out", r"ff_[it]\.(shared_experts\.)?w[13]": "ffn_in|expert_in", r"ff_[it]\.(shared_experts\.)?w2": "ffn_out|expert_out", r"experts\.\d+\.w[13]": "expert_in", r"experts\.\d+\.w2": "expert_out", r"final_layer\.linear": "head"},
              lambda: {"hidden_states": image(2, 4, 8, 8), "timesteps": step(), "encoder_hidden_states_t5": image(2, 7, 44), "encoder_hidden_states_llama3": image(2, 2, 5, 44)[None][0].permute(1, 0, 2, 3).contiguous(), "pooled_embeds": image(2, 28)},
              patch_size=2, in_channels=4, out_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=6, caption_channels=[44, 44], text_emb_dim=28, num_routed_experts=4, num_activated_experts=2, axes_dims_rope=(8, 4, 4), max_resolution=(8, 8), llama_layers=[0, 1]),
    diffusing("unet", "UNet2DConditionModel",
              {r"time_embedding\.linear_[12]|time_emb_proj": "conditioning", "proj_in|proj_out": "mx|bf16", "conv_shortcut": "bf16|mx", **QKV, **FF},
              lambda: {"sample": image(2, 4, 16, 16), "timestep": step(), "encoder_hidden_states": image(2, 7, 44)},
              sample_size=16, block_out_channels=(32, 48), layers_per_block=1, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=44, attention_head_dim=8, norm_num_groups=8, use_linear_projection=True),
    diffusing("auraflow", "AuraFlowTransformer2DModel", {r"pos_embed\.proj": TOKENS, "context_embedder": TOKENS, r"time_step_proj\.linear_[12]": "conditioning", r"norm\w*\.linear": "conditioning", r"ff\w*\.linear_1|ff\w*\.linear_2": "ffn_in", r"ff\w*\.out_projection": "ffn_out", "proj_out": "head", **QKV},
              lambda: {"hidden_states": image(2, 4, 8, 8), "encoder_hidden_states": image(2, 7, 44), "timestep": step()},
              sample_size=8, in_channels=4, out_channels=4, num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=16, num_attention_heads=6, joint_attention_dim=44, caption_projection_dim=96, pos_embed_max_size=64),
    diffusing("cogvideox", "CogVideoXTransformer3DModel", {r"patch_embed\.(proj|text_proj)": TOKENS, r"time_embedding\.linear_[12]": "conditioning", r"norm\w*\.linear": "conditioning", "proj_out": "head", **QKV, **FF},
              lambda: {"hidden_states": image(2, 1, 4, 8, 8), "encoder_hidden_states": image(2, 7, 44), "timestep": step()},
              num_attention_heads=6, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=52, text_embed_dim=44, num_layers=2, sample_width=8, sample_height=8, sample_frames=1, max_text_seq_length=7),
    diffusing("mochi", "MochiTransformer3DModel", {"rope": "other", r"time_embed\.timestep_embedder\.linear_[12]": "conditioning", r"time_embed\.pooler\.(to_kv|to_q|to_out)": "mx|bf16", r"time_embed\.caption_proj": TOKENS, r"norm\w*\.linear(_1)?": "conditioning", "proj_out": "head", **QKV, **FF},
              lambda: {**_video(4, 48), "encoder_attention_mask": torch.ones(2, 7).bool()},
              patch_size=2, num_attention_heads=6, attention_head_dim=16, num_layers=2, pooled_projection_dim=28, in_channels=4, text_embed_dim=48, time_embed_dim=52, max_sequence_length=7),
    diffusing("lumina2", "Lumina2Transformer2DModel", {"x_embedder": TOKENS, r"time_caption_embed\.timestep_embedder\.linear_[12]": "conditioning", r"time_caption_embed\.caption_embedder\.1": TOKENS, r"norm1\.linear": "conditioning", r"norm_out\.linear_1": "conditioning", r"norm_out\.linear_2": "head", r"feed_forward\.linear_[13]": "ffn_in", r"feed_forward\.linear_2": "ffn_out", **QKV},
              lambda: {"hidden_states": image(2, 4, 8, 8), "timestep": step(), "encoder_hidden_states": image(2, 7, 44), "encoder_attention_mask": torch.ones(2, 7).bool()},
              sample_size=8, in_channels=4, hidden_size=96, num_layers=2, num_refiner_layers=1, num_attention_heads=6, num_kv_heads=2, multiple_of=16, axes_dim_rope=(4, 6, 6), axes_lens=(16, 16, 16), cap_feat_dim=44),
    diffusing("qwen_image", "QwenImageTransformer2DModel", {"img_in|txt_in": TOKENS, r"(img|txt)_mod\.1": "conditioning", r"(img|txt)_mlp\.net\.0\.proj": "ffn_in", r"(img|txt)_mlp\.net\.2": "ffn_out", r"norm_out\.linear": "conditioning", "proj_out": "head", **TIME, **QKV},
              lambda: {"hidden_states": image(2, 16, 20), "encoder_hidden_states": image(2, 7, 44), "encoder_hidden_states_mask": torch.ones(2, 7).bool(), "timestep": step(), "img_shapes": [[(1, 4, 4)]] * 2},
              dead=r"transformer_blocks\.1\.(attn\.to_add_out|txt_mlp\.net\.(0\.proj|2))", in_channels=20, out_channels=5, num_layers=2, attention_head_dim=16, num_attention_heads=6, joint_attention_dim=44, axes_dims_rope=(4, 6, 6)),
    diffusing("stable_audio", "StableAudioDiTModel", {r"timestep_proj\.\d|global_proj\.\d": "conditioning|embedding", "time_proj": "bf16", r"cross_attention_proj\.\d": TEXT, "proj_in": TOKENS, "preprocess_conv|postprocess_conv": "mx|bf16", "proj_out": "head", **QKV, **FF},
              lambda: {"hidden_states": image(2, 20, 15), "timestep": step(), "encoder_hidden_states": image(2, 7, 44), "global_hidden_states": image(2, 1, 28), "rotary_embedding": (image(16, 8), image(16, 8))},
              sample_size=15, in_channels=20, num_layers=2, attention_head_dim=16, num_attention_heads=6, num_key_value_attention_heads=3, out_channels=20, cross_attention_dim=48, time_proj_dim=52, global_states_input_dim=28, cross_attention_input_dim=44),
    diffusing("cogview4", "CogView4Transformer2DModel", {r"patch_embed\.(proj|text_proj)": TOKENS, r"time_condition_embed(\.\w+)*\.linear_[12]": "conditioning", r"norm\w*\.linear": "conditioning", "proj_out": "head", **QKV, **FF},
              lambda: {"hidden_states": image(2, 4, 8, 8), "encoder_hidden_states": image(2, 7, 44), "timestep": step(), "original_size": image(2, 2), "target_size": image(2, 2), "crop_coords": image(2, 2)},
              flops_tolerance=0.2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=6, text_embed_dim=44, time_embed_dim=52, condition_dim=36, sample_size=8, rope_axes_dim=(8, 8)),
    diffusing("prior", "PriorTransformer", {r"time_embedding\.linear_[12]": "conditioning|embedding|other", "proj_in|embedding_proj|encoder_hidden_states_proj": TOKENS, "proj_to_clip_embeddings": "head", **QKV, **FF},
              lambda: {"hidden_states": image(2, 28), "timestep": step(), "proj_embedding": image(2, 28), "encoder_hidden_states": image(2, 7, 28)},
              num_attention_heads=6, attention_head_dim=16, num_layers=2, embedding_dim=28, num_embeddings=7),
)  # fmt: skip
