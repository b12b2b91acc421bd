"""vit-pytorch and x-transformers: attention written out, in sequences without names."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from animal import Animal, Build, Call
from torchvision_standin import torchvision

from animals.build import ids, image

FF = {r"net\.1": "ffn_in", r"net\.4": "ffn_out"}
PATCHES = {r"to_patch_embedding\.\d": "embedding|other"}
TO = {"to_qkv|to_q|to_kv|to_k|to_v": "qkv", r"to_out(\.0)?": "attn_out"}
IMAGES = {"image_size": 24, "patch_size": 8, "num_classes": 7}
SIZES = {**IMAGES, "dim": 96, "depth": 2, "heads": 6, "mlp_dim": 208, "dim_head": 20}


def vit(name: str, module: str, kind: str, expect: dict[str, str], size: int = 24, **settings: Any) -> Animal:
    """A model of vit-pytorch."""

    def make(build: Build) -> Call:
        with torchvision():
            model = getattr(import_module(f"vit_pytorch.{module}"), kind)(**settings)
        return model, (image(2, 3, size, size),), {}

    return Animal(name=f"lucid_{name}", make=make, expect=expect)


def x(
    name: str,
    expect: dict[str, str],
    layers: str = "Decoder",
    wrapper: str = "TransformerWrapper",
    **settings: Any,
) -> Animal:
    """A model of x-transformers: layers in a wrapper."""

    def make(build: Build) -> Call:
        import x_transformers as library

        flash = build.attention == "sdpa" and "talking" not in name
        sizes = {"dim": 96, "depth": 2, "heads": 6, "attn_dim_head": 20}
        stack = getattr(library, layers)(**sizes, attn_flash=flash, **settings)
        around, x = {
            "ViTransformerWrapper": (IMAGES, image(2, 3, 24, 24)),
            "ContinuousTransformerWrapper": (
                {"dim_in": 20, "dim_out": 28, "max_seq_len": 61},
                image(2, 19, 20),
            ),
            "TransformerWrapper": ({"num_tokens": 517, "max_seq_len": 61}, ids()),
        }[wrapper]
        return getattr(library, wrapper)(**around, attn_layers=stack), (x,), {}

    return Animal(name=f"x_{name}", make=make, expect=expect, attentions=("sdpa", "eager"))


def _both() -> Callable[[Build], Call]:
    def make(build: Build) -> Call:
        from x_transformers import XTransformer

        encoder = {"enc_num_tokens": 517, "enc_depth": 1, "enc_heads": 6, "enc_max_seq_len": 61}
        decoder = {"dec_num_tokens": 523, "dec_depth": 1, "dec_heads": 4, "dec_max_seq_len": 61}
        model = XTransformer(dim=96, **encoder, **decoder)
        return model, (ids(), ids(2, 13)), {}

    return make


XFF = {r"ff\.0\.0|ff\.0\.proj": "ffn_in", r"ff\.[23]": "ffn_out"}
XHEAD = {"to_logits": "head"}

LUCID = (
    vit("vit", "vit", "ViT", {**TO, **FF, **PATCHES, "mlp_head": "head"}, **SIZES),
    vit("simple_vit", "simple_vit", "SimpleViT", {**TO, r"net\.1": "ffn_in", r"net\.3": "ffn_out", **PATCHES, "linear_head": "head"}, **SIZES),
    vit("parallel_vit", "parallel_vit", "ViT", {**TO, r"net\.[01]": "ffn_in", r"net\.[34]": "ffn_out", **PATCHES, r"mlp_head\.1": "head"}, **SIZES),
    vit("cait", "cait", "CaiT", {**TO, r"net\.1": "ffn_in", r"net\.4": "ffn_out", **PATCHES, r"mlp_head\.1": "head", "?mix_heads_pre_attn|mix_heads_post_attn|fn": "bf16"}, **SIZES, cls_depth=1),
    vit("deepvit", "deepvit", "DeepViT", {**TO, r"net\.1": "ffn_in", r"net\.4": "ffn_out", **PATCHES, r"mlp_head\.1": "head", "?reattn_weights|fn": "bf16"}, **SIZES),
    vit("t2t", "t2t", "T2TViT", {r"to_patch_embedding(\.\d+)*\.layers\.\d\.0\.(to_qkv)": "qkv", **FF, **TO, **PATCHES, "mlp_head": "head"}, 32, image_size=32, num_classes=7, dim=96, depth=2, heads=6, mlp_dim=208, dim_head=20, t2t_layers=((3, 2), (3, 2))),
    vit("cvt", "cvt", "CvT", {r"to_q\.net\.2|to_kv\.net\.2": "qkv", r"to_out\.0": "attn_out", r"\d\.net\.1": "ffn_in", r"\d\.net\.4": "ffn_out", r"to_logits\.\d": "head"}, 64, num_classes=7, s1_emb_dim=24, s2_emb_dim=48, s2_heads=2, s2_depth=1, s3_emb_dim=72, s3_heads=3, s3_depth=1, s1_mlp_mult=3, s2_mlp_mult=3, s3_mlp_mult=3),
    vit("xcit", "xcit", "XCiT", {**TO, r"net\.1": "ffn_in", r"net\.4": "ffn_out", **PATCHES, r"mlp_head\.1": "head"}, **SIZES, cls_depth=1, local_patch_kernel_size=3),
    vit("crossvit", "cross_vit", "CrossViT", {**TO, r"net\.1": "ffn_in", r"net\.4": "ffn_out", **PATCHES, r"(sm|lg)_mlp_head\.1": "head", "project_in|project_out": "mx|bf16"}, 48, image_size=48, num_classes=7, sm_dim=48, lg_dim=72, sm_patch_size=8, lg_patch_size=16, sm_enc_heads=4, sm_enc_mlp_dim=88, sm_enc_dim_head=20, lg_enc_depth=1, lg_enc_heads=4, lg_enc_mlp_dim=120, lg_enc_dim_head=20, cross_attn_depth=1, cross_attn_heads=4, cross_attn_dim_head=20, depth=1),
    vit("nest", "nest", "NesT", {r"to_qkv": "qkv", r"to_out\.0": "attn_out", r"net\.0|net\.1": "ffn_in", r"net\.3|net\.4": "ffn_out", r"to_patch_embedding\.\d": "embedding|other", r"mlp_head\.2": "head"}, 32, image_size=32, patch_size=4, num_classes=7, dim=24, heads=2, num_hierarchies=2, block_repeats=(1, 1), dim_head=20),
    x("decoder", {**TO, **XFF, **XHEAD}),
    x("encoder", {**TO, **XFF, **XHEAD}, "Encoder"),
    x("swiglu_rotary", {**TO, **XFF, **XHEAD}, ff_swish=True, ff_glu=True, ff_no_bias=True, rotary_pos_emb=True, use_rmsnorm=True),
    x("one_kv", {**TO, **XFF, **XHEAD}, attn_kv_heads=2, attn_qk_norm=True),
    x("talking_heads", {**TO, **XFF, **XHEAD, r"attend\.(pre|post)_softmax_talking_heads": "bf16"}, attn_pre_talking_heads=True, attn_post_talking_heads=True),
    x("macaron", {**TO, **XFF, **XHEAD}, macaron=True),
    x("gated", {"to_v_gate|to_value_residual_mix(.0)?": "qkv|bf16", **TO, **XFF, **XHEAD}, attn_gate_values=True),
    x("post_norm_relu2", {**TO, **XFF, **XHEAD}, pre_norm=False, ff_relu_squared=True, alibi_pos_bias=True),
    x("vit", {**TO, **XFF, "patch_to_embedding.1|patch_to_embedding": "embedding|other", r"mlp_head(\.\d)?": "head"}, "Encoder", "ViTransformerWrapper"),
    x("continuous", {**TO, **XFF, "project_in": "embedding|other", "project_out": "head"}, "Decoder", "ContinuousTransformerWrapper"),
    Animal(name="x_both", make=_both(), expect={**TO, **XFF, **XHEAD}),
)  # fmt: skip
