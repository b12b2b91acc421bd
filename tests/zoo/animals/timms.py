"""Image models of timm, from its registry with their sizes turned down."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from animal import Animal, Build, Call
from torchvision_standin import torchvision

from animals.build import about_animal, image

BLOCK = {
    r"attn\.(qkv|q|kv|k|v)": "qkv",
    r"attn\.proj": "attn_out",
    r"mlp\.fc1": "ffn_in",
    r"mlp\.fc2": "ffn_out",
}
HEAD = {r"head(\.fc)?": "head"}
VIT = {"img_size": 24, "patch_size": 8, "embed_dim": 96, "depth": 2, "num_heads": 6}


def timm(kind: str, size: int, **settings: Any) -> Callable[[Build], Call]:
    """A maker of the timm model `kind`, or of ``module:Class``. Eager attention is `fused_attn` switched off."""

    def make(build: Build) -> Call:
        with torchvision():
            from timm import create_model

        module, _, name = kind.partition(":")
        if name:
            values = {key: value() if callable(value) else value for key, value in settings.items()}
            model = getattr(import_module(f"timm.models.{module}"), name)(num_classes=7, **values)
        else:
            model = create_model(kind, pretrained=False, num_classes=7, **settings)
        for module in model.modules():
            if build.attention == "eager" and hasattr(module, "fused_attn"):
                module.fused_attn = False
        return model, (image(2, 3, size, size),), {}

    return make


def seeing(name: str, kind: str, expect: dict[str, str], size: int = 24, **settings: Any) -> Animal:
    """A model of timm that has `fused_attn`, or no attention at all."""
    about = about_animal(settings, attentions=("sdpa", "eager"))
    return Animal(name=f"timm_{name}", make=timm(kind, size, **settings), expect=expect, **about)


def _maxvit() -> Any:
    maxxvit = import_module("timm.models.maxxvit")
    attention = maxxvit.MaxxVitTransformerCfg(dim_head=12, window_size=(4, 4), grid_size=(4, 4))
    sizes = {"embed_dim": (24, 48), "depths": (1, 1), "stem_width": 16, "head_hidden_size": 40}
    return maxxvit.MaxxVitCfg(block_type=("M", "M"), transformer_cfg=attention, **sizes)


def _caformer() -> Any:
    metaformer = import_module("timm.models.metaformer")
    return [metaformer.SepConv, metaformer.SepConv, metaformer.Attention, metaformer.Attention]


def _caformer_norms() -> Any:
    metaformer = import_module("timm.models.metaformer")
    return [metaformer.LayerNorm2dNoBias] * 2 + [metaformer.LayerNormNoBias] * 2


def _mlp(name: str) -> Callable[[], Any]:
    return lambda: getattr(import_module("timm.models.mlp_mixer"), name)


def _spatial_mlp() -> Any:
    return import_module("timm.layers").GatedMlp


CAIT = {
    r"attn\.(qkv|q|k|v)": "qkv", r"attn\.proj": "attn_out", r"attn\.proj_l|attn\.proj_w": "bf16",
    r"mlp\w*\.fc1": "ffn_in", r"mlp\w*\.fc2": "ffn_out", **HEAD,
}  # fmt: skip
POINTWISE = {r"mlp\.fc1": "ffn_in", r"mlp\.fc2": "ffn_out"}
ANY = "mx|bf16"

TIMMS = (
    seeing("vit", "vit_tiny_patch16_224", {**BLOCK, **HEAD}, **VIT),
    seeing("deit", "deit_tiny_distilled_patch16_224", {**BLOCK, "head|head_dist": "head"}, **VIT),
    seeing("vit_siglip", "vit_base_patch16_siglip_224", {r"attn_pool\.kv": "qkv", r"attn_pool\.q": "qkv|other", r"attn_pool\.proj": "attn_out", **BLOCK, **HEAD}, **VIT),
    seeing("eva02", "eva02_tiny_patch14_224", {**BLOCK, **HEAD}, **VIT),
    seeing("beit", "beit_base_patch16_224", {**BLOCK, **HEAD}, **VIT),
    seeing("cait", "cait_xxs24_224", CAIT, **VIT),
    seeing("hiera", "hiera_tiny_224", {**BLOCK, r"blocks\.\d+\.proj": "embedding|other", **HEAD}, 64, img_size=(64, 64), embed_dim=24, num_heads=1, stages=(1, 1, 1), q_pool=2, mask_unit_size=(8, 8)),
    seeing("swin", "swin_tiny_patch4_window7_224", {**BLOCK, r"downsample\.reduction": "embedding|other", **HEAD}, 32, img_size=32, embed_dim=24, depths=(1, 2), num_heads=(2, 4), window_size=4),
    seeing("swinv2", "swinv2_tiny_window8_256", {**BLOCK, r"cpb_mlp\.\d": "bf16", r"downsample\.reduction": "embedding|other", **HEAD}, 32, img_size=32, embed_dim=24, depths=(1, 2), num_heads=(2, 4), window_size=4),
    seeing("maxvit", "maxxvit:MaxxVit", {**BLOCK, r".*conv1_1x1|.*conv3_1x1|.*shortcut\.expand": ANY, r".*se\.fc[12]": ANY, r"head\.pre_logits\.fc": "bf16", **HEAD}, 64, img_size=64, cfg=_maxvit),
    seeing("convnext", "convnext_tiny", {**POINTWISE, **HEAD}, 64, depths=(1, 1, 1, 2), dims=(24, 40, 56, 72)),
    seeing("mambaout", "mambaout_femto", {r"blocks\.\d+\.fc1": "ffn_in|mixer_in", r"blocks\.\d+\.fc2": "ffn_out|mixer_out", r"head\.(fc1|pre_logits\.fc)": "bf16", **HEAD}, 32, depths=(1, 2), dims=(24, 40)),
    seeing("caformer", "metaformer:MetaFormer", {r"token_mixer\.qkv": "qkv", r"token_mixer\.proj": "attn_out", r"token_mixer\.pwconv1": "ffn_in|mixer_in", r"token_mixer\.pwconv2": "ffn_out|mixer_out", **POINTWISE, r"head\.fc\.fc1": "bf16", r"head\.fc\.fc2": "head"}, 64, depths=(1, 1, 1, 1), dims=(24, 40, 64, 96), token_mixers=_caformer, norm_layers=_caformer_norms, use_mlp_head=True),
    seeing("poolformer", "metaformer:MetaFormer", {**POINTWISE, **HEAD}, 64, depths=(1, 1, 1, 1), dims=(24, 40, 56, 72), use_mlp_head=False),
    seeing("mixer", "mlp_mixer:MlpMixer", {r"mlp_tokens\.fc1|mlp_channels\.fc1": "ffn_in", r"mlp_tokens\.fc2|mlp_channels\.fc2": "ffn_out", **HEAD}, img_size=24, patch_size=8, embed_dim=96, num_blocks=2),
    seeing("gmlp", "mlp_mixer:MlpMixer", {r"mlp_channels\.fc1": "ffn_in", r"mlp_channels\.fc2": "ffn_out", r"gate\.proj": "mx", **HEAD}, img_size=24, patch_size=8, embed_dim=96, num_blocks=2, mlp_ratio=3, block_layer=_mlp("SpatialGatingBlock"), mlp_layer=_spatial_mlp),
    seeing("resmlp", "mlp_mixer:MlpMixer", {r"linear_tokens": "mx|other", r"mlp_channels\.fc1": "ffn_in", r"mlp_channels\.fc2": "ffn_out", **HEAD}, img_size=24, patch_size=8, embed_dim=96, num_blocks=2, mlp_ratio=3, block_layer=_mlp("ResBlock")),
    seeing("xcit", "xcit_nano_12_p16_224", {r"pos_embed\.token_projection": "bf16", **BLOCK, **HEAD}, 32, img_size=32, embed_dim=96, depth=2, num_heads=6),
    seeing("twins", "twins_svt_small", {**BLOCK, **HEAD}, 64, img_size=64, embed_dims=(16, 24, 40, 56), num_heads=(1, 2, 4, 7), depths=(1, 1, 1, 2), wss=(4, 4, 2, 2)),
    seeing("pvt_v2", "pvt_v2_b0", {**BLOCK, **HEAD}, 64, embed_dims=(16, 24, 40, 56), num_heads=(1, 2, 4, 7), depths=(1, 1, 1, 1)),
    seeing("volo", "volo:VOLO", {r"attn\.v": "qkv|mx|bf16", r"attn\.attn": "bf16|mx", r"attn\.(q|kv)": "qkv", **BLOCK, "aux_head": "head", r"?network\.\d+\.\d+\.attn": "bf16", **HEAD}, 64, img_size=64, layers=(1, 1), embed_dims=(24, 48), num_heads=(2, 4), mlp_ratio=3, downsamples=(True, False), outlook_attention=(True, False), stem_hidden_dim=16, attentions=("sdpa",)),
    seeing("crossvit", "crossvit_tiny_240", {r"attn\.w[qkv]": "qkv", **BLOCK, r"projs\.\d+\.\d+|revert_projs\.\d+\.\d+": "bf16|mx", r"head\.\d": "head"}, 240, depth=((1, 1, 0),), embed_dim=(24, 40), num_heads=(2, 4)),
    seeing("tnt", "tnt_s_legacy_patch16_224", {r"attn_in\.(qk|v)|attn_out\.(qk|v)": "qkv", r"attn_in\.proj|attn_out\.proj": "attn_out", r"mlp\w*\.fc1": "ffn_in", r"mlp\w*\.fc2": "ffn_out", r"blocks\.\d+\.proj": ANY, "proj": "embedding|other", **HEAD}, 32, img_size=32, embed_dim=96, inner_dim=24, depth=2, num_heads_inner=3, num_heads_outer=6),
    seeing("davit", "davit_tiny", {**BLOCK, **HEAD}, 64, depths=(1, 1), embed_dims=(24, 40), num_heads=(2, 4), window_size=4),
    seeing("edgenext", "edgenext_xx_small", {r"xca\.qkv": "qkv", r"xca\.proj": "attn_out", **POINTWISE, r".*pos_embd\.token_projection|.*pos_embd\.\w+": "bf16", **HEAD}, 64, dims=(24, 48, 88, 168), depths=(1, 1, 1, 2)),
)  # fmt: skip
