"""Vision in transformers: backbones, detectors, two towers, images beside text.

A patch embedding by convolution is no linear layer; one by a linear layer is an embedding.
"""

from __future__ import annotations

from typing import Any

from animal import Animal

from animals.build import about_animal, hf, ids, image
from animals.decoders import FC, LLAMA, QKV
from animals.encoders import OUTPUTS

CLASSIFIER = {"classifier": "head"}
VIT_SIZES = {
    "hidden_size": 96, "intermediate_size": 208, "num_hidden_layers": 2, "num_attention_heads": 6, "image_size": 24,
    "patch_size": 8, "num_labels": 7,
}  # fmt: skip
VIT = {
    "q_proj|k_proj|v_proj|query|key|value": "qkv",
    r"attention\.output\.dense|o_proj|out_proj": "attn_out",
    r"intermediate\.dense|fc1": "ffn_in",
    r"output\.dense|fc2": "ffn_out",
}
CLIP = {**QKV, "out_proj": "attn_out", **FC}
TOWER = {"hidden_size": 96, "intermediate_size": 208, "num_hidden_layers": 2, "num_attention_heads": 6}


def pixels(size: int = 24, channels: int = 3):
    """A maker of images."""
    return lambda: {"pixel_values": image(2, channels, size, size)}


def seeing(name: str, model: str, expect: dict[str, str], inputs=None, **settings: Any) -> Animal:
    """A model of transformers that sees."""
    about = about_animal(settings, attentions=("sdpa", "eager"))
    return Animal(name=name, make=hf(model, inputs or pixels(), **settings), expect=expect, **about)


def both():
    """Text and images."""
    return {"input_ids": ids(2, 11), "pixel_values": image(2, 3, 24, 24)}


VISION = (
    seeing("vit", "ViTForImageClassification", {**VIT, **CLASSIFIER}, **VIT_SIZES),
    seeing("deit", "DeiTForImageClassification", {**VIT, **CLASSIFIER}, **VIT_SIZES),
    seeing("beit", "BeitForImageClassification", {**VIT, **CLASSIFIER}, **VIT_SIZES),
    seeing("dinov2", "Dinov2ForImageClassification", {**VIT, **CLASSIFIER}, **{k: v for k, v in VIT_SIZES.items() if k != "intermediate_size"}, mlp_ratio=3),
    seeing("vit_mae", "ViTMAEForPreTraining", {"decoder_embed": "embedding|other", "decoder_pred": "head", **VIT}, **{k: v for k, v in VIT_SIZES.items() if k != "num_labels"}, decoder_hidden_size=80, decoder_num_hidden_layers=1, decoder_num_attention_heads=5, decoder_intermediate_size=176),
    seeing("yolos", "YolosForObjectDetection", {**VIT, r"class_labels_classifier\.layers\.\d+|bbox_predictor\.layers\.\d+": "bf16"}, **{**VIT_SIZES, "image_size": [24, 24]}, num_detection_tokens=5),
    seeing("swin", "SwinForImageClassification", {**VIT, r"downsample\.reduction": "embedding|other", **CLASSIFIER}, pixels(32), image_size=32, patch_size=4, embed_dim=24, depths=[1, 2], num_heads=[2, 4], window_size=4, num_labels=7, attentions=("eager",)),
    seeing("swinv2", "Swinv2ForImageClassification", {r"continuous_position_bias_mlp\.\d": "bf16", **VIT, r"downsample\.reduction": "embedding|other", **CLASSIFIER}, pixels(32), image_size=32, patch_size=4, embed_dim=24, depths=[1, 2], num_heads=[2, 4], window_size=4, num_labels=7, attentions=("eager",)),
    seeing("segformer", "SegformerForSemanticSegmentation",
           {**QKV, "o_proj": "attn_out", **FC, r"linear_projections\.\d\.proj|linear_fuse": "bf16", r"decode_head\.classifier": "head"},
           pixels(64), depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 48, 80], num_attention_heads=[1, 2, 3, 5], decoder_hidden_size=56, num_labels=7, attentions=("eager",)),
    seeing("convnext", "ConvNextForImageClassification", {"pwconv1": "ffn_in", "pwconv2": "ffn_out", **CLASSIFIER}, pixels(32), num_stages=2, hidden_sizes=[24, 40], depths=[1, 2], num_labels=7, attentions=("eager",)),
    seeing("convnextv2", "ConvNextV2ForImageClassification", {"pwconv1": "ffn_in", "pwconv2": "ffn_out", **CLASSIFIER}, pixels(32), num_stages=2, hidden_sizes=[24, 40], depths=[1, 2], num_labels=7, attentions=("eager",)),
    seeing("hiera", "HieraForImageClassification", {r"attn\.qkv": "qkv", r"attn\.proj": "attn_out", "fc1": "ffn_in", "fc2": "ffn_out", r"layers\.\d+\.proj": "embedding|other", **CLASSIFIER}, pixels(64), image_size=[64, 64], embed_dim=24, num_heads=[1, 2, 4], depths=[1, 1, 1], embed_dim_multiplier=2.0, num_query_pool=2, query_stride=[2, 2], masked_unit_size=[8, 8], patch_size=[7, 7], patch_stride=[4, 4], patch_padding=[3, 3], num_labels=7, attentions=("eager",)),
    seeing("pvt", "PvtForImageClassification", {"query|key|value": "qkv", r"attention\.output\.dense": "attn_out", "dense1": "ffn_in", "dense2": "ffn_out", **CLASSIFIER}, pixels(64), image_size=64, depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 48, 80], num_attention_heads=[1, 2, 3, 5], num_labels=7, attentions=("eager",)),
    seeing("mobilevit", "MobileViTForImageClassification", {"query|key|value": "qkv", **OUTPUTS, r"\w+\.convolution": "bf16|mx", **CLASSIFIER}, pixels(64), image_size=64, hidden_sizes=[24, 32, 40], neck_hidden_sizes=[8, 12, 16, 20, 24, 28, 36], num_attention_heads=4, num_labels=7, attentions=("eager",)),
    seeing("vivit", "VivitForVideoClassification", {**VIT, **CLASSIFIER}, lambda: {"pixel_values": image(2, 4, 3, 24, 24)}, **VIT_SIZES, num_frames=4, tubelet_size=[2, 8, 8]),
    seeing("videomae", "VideoMAEForVideoClassification", {**VIT, **CLASSIFIER}, lambda: {"pixel_values": image(2, 4, 3, 24, 24)}, **VIT_SIZES, num_frames=4, tubelet_size=2),
    seeing("timesformer", "TimesformerForVideoClassification", {r"attention\.qkv": "qkv", r"\w*attention\.output\.dense": "attn_out", "temporal_dense": "attn_out|mx|bf16", r"intermediate\.dense": "ffn_in", r"output\.dense": "ffn_out", **CLASSIFIER}, lambda: {"pixel_values": image(2, 4, 3, 24, 24)}, **VIT_SIZES, num_frames=4, attentions=("eager",)),
    seeing("detr", "DetrForObjectDetection",
           {**QKV, "out_proj|o_proj": "attn_out", **FC, "input_projection": "embedding|other", "class_labels_classifier": "head", r"bbox_predictor\.layers\.\d": "bf16", r"\w*conv\w*\.convolution|.*\.convolution|shortcut.*": "bf16|mx"},
           pixels(64), d_model=96, encoder_layers=2, decoder_layers=2, encoder_attention_heads=6, decoder_attention_heads=6, encoder_ffn_dim=208, decoder_ffn_dim=176, num_queries=11, use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, num_labels=7,
           sub={"backbone_config": "ResNetConfig"}, backbone_config={"embedding_size": 16, "hidden_sizes": [24, 40], "depths": [1, 1], "layer_type": "basic", "out_features": ["stage2"]}, attentions=("eager",)),
    seeing("conditional_detr", "ConditionalDetrForObjectDetection",
           {r"\w*(q|k|v|qpos|kpos|content|sine|pos)_?\w*_proj": "qkv|bf16", "out_proj|o_proj": "attn_out", **FC, "input_projection": "embedding|other", "class_labels_classifier": "head", r"bbox_predictor\.layers\.\d|ref_point_head\.layers\.\d|query_scale\.layers\.\d": "bf16", r".*\.convolution|shortcut.*": "bf16|mx"},
           pixels(64), d_model=96, encoder_layers=2, decoder_layers=2, encoder_attention_heads=6, decoder_attention_heads=6, encoder_ffn_dim=208, decoder_ffn_dim=176, num_queries=11, use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, num_labels=7,
           sub={"backbone_config": "ResNetConfig"}, backbone_config={"embedding_size": 16, "hidden_sizes": [24, 40], "depths": [1, 1], "layer_type": "basic", "out_features": ["stage2"]}, attentions=("eager",)),
    seeing("perceiver", "PerceiverForImageClassificationLearned",
           {r"\w*cross_attention\.attention\.self\.query": "qkv|other", "query|key|value": "qkv", r"attention\.output\.dense": "attn_out", r"mlp\.dense1": "ffn_in", r"mlp\.dense2": "ffn_out", r"decoding_cross_attention\.final_layer|final_layer": "head", "convnet_1x1": "embedding|other", "positions_projection": "bf16"},
           pixels(24), num_latents=9, d_latents=96, d_model=64, num_blocks=1, num_self_attends_per_block=2, num_self_attention_heads=6, num_cross_attention_heads=2, image_size=24, num_labels=7, attentions=("eager",)),
    seeing("clip", "CLIPModel", {**CLIP, "visual_projection|text_projection": "bf16", "": "bf16"}, lambda: both(), sub={"text_config": "CLIPTextConfig", "vision_config": "CLIPVisionConfig"}, text_config={**TOWER, "vocab_size": 517, "max_position_embeddings": 61, "eos_token_id": 2}, vision_config={**TOWER, "hidden_size": 80, "num_attention_heads": 5, "intermediate_size": 176, "image_size": 24, "patch_size": 8}, projection_dim=48),
    seeing("siglip", "SiglipModel", {**CLIP, r"head\.attention(\.in_proj)?": "qkv|other", r"text_model\.head": "bf16", "": "bf16"}, lambda: both(), sub={"text_config": "SiglipTextConfig", "vision_config": "SiglipVisionConfig"}, text_config={**TOWER, "vocab_size": 517, "max_position_embeddings": 61, "projection_size": 80}, vision_config={**TOWER, "hidden_size": 80, "num_attention_heads": 5, "intermediate_size": 176, "image_size": 24, "patch_size": 8}),
    seeing("sam", "SamModel",
           {r"attn\.qkv": "qkv", r"attn\.proj": "attn_out", r"mlp\.lin1": "ffn_in", r"mlp\.lin2": "ffn_out", **QKV, "out_proj": "attn_out", r"output_hypernetworks_mlps\.\d+\.\w+(\.\d+)?": "bf16", r"iou_prediction_head\.\w+(\.\d+)?": "bf16", r"neck\.conv1": "bf16|mx", r"(shared_image_embedding|shared_embedding)(\.positional_embedding)?": "bf16", r"mask_decoder": "bf16", r"vision_encoder\.layers\.\d+\.attn": "bf16"},
           lambda: {"pixel_values": image(1, 3, 64, 64), "input_points": image(1, 1, 2, 2)},
           sub={"vision_config": "SamVisionConfig", "prompt_encoder_config": "SamPromptEncoderConfig", "mask_decoder_config": "SamMaskDecoderConfig"},
           vision_config={"hidden_size": 96, "output_channels": 32, "num_hidden_layers": 2, "num_attention_heads": 6, "image_size": 64, "patch_size": 16, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 208, "num_pos_feats": 16},
           prompt_encoder_config={"hidden_size": 32, "image_size": 64, "patch_size": 16, "mask_input_channels": 8},
           mask_decoder_config={"hidden_size": 32, "mlp_dim": 56, "num_hidden_layers": 2, "num_attention_heads": 4, "iou_head_hidden_dim": 40}),
    seeing("llava", "LlavaForConditionalGeneration",
           {"multi_modal_projector.linear_1": "mx|bf16", "multi_modal_projector.linear_2": "mx|bf16", **CLIP, **LLAMA},
           lambda: {"input_ids": _with_images(9), "pixel_values": image(1, 3, 24, 24)},
           sub={"text_config": "LlamaConfig", "vision_config": "CLIPVisionConfig"}, text_config={**TOWER, "num_key_value_heads": 2, "vocab_size": 530}, vision_config={**TOWER, "hidden_size": 80, "num_attention_heads": 5, "intermediate_size": 176, "image_size": 24, "patch_size": 8, "num_hidden_layers": 3}, image_token_index=520, vision_feature_layer=-2),
    seeing("idefics3", "Idefics3ForConditionalGeneration",
           {r"connector\.modality_projection\.proj": "mx|bf16", **CLIP, **LLAMA},
           lambda: {"input_ids": _with_images(9), "pixel_values": image(1, 1, 3, 24, 24)},
           sub={"text_config": "LlamaConfig", "vision_config": "Idefics3VisionConfig"}, text_config={**TOWER, "num_key_value_heads": 2, "vocab_size": 530, "pad_token_id": 0}, vision_config={**TOWER, "hidden_size": 80, "num_attention_heads": 5, "intermediate_size": 176, "image_size": 24, "patch_size": 8}, image_token_id=520, scale_factor=1, pad_token_id=0),
    seeing("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration",
           {r"attn\.qkv": "qkv", r"attn\.proj": "attn_out", r"merger\.mlp\.\d": "mx|bf16", **LLAMA},
           lambda: {"input_ids": _with_images(4), "pixel_values": image(16, 3 * 2 * 8 * 8), "image_grid_thw": _grid()},
           sub={}, text_config={**TOWER, "num_key_value_heads": 2, "vocab_size": 530, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}, vision_config={"hidden_size": 80, "depth": 2, "num_heads": 5, "intermediate_size": 176, "patch_size": 8, "out_hidden_size": 96, "window_size": 32, "fullatt_block_indexes": [1]}, image_token_id=520, vision_start_token_id=521, video_token_id=522),
)  # fmt: skip


def _with_images(count: int):
    tokens = ids(1)
    tokens[:, 2 : 2 + count] = 520
    return tokens


def _grid():
    import torch

    return torch.tensor([[1, 4, 4]])
