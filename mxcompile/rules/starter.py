"""Writes a policy file for one model that decides like a preset, with the layers in comments.

The file has one rule per role, so that a user changes a decision by changing a word. Unchanged, it decides
like the preset for every layer; only the reasons in reports name the rules.
"""

from __future__ import annotations

from collections.abc import Sequence

from mxcompile.errors import printable
from mxcompile.formats import BLOCK, UNQUANTIZED, is_quantized
from mxcompile.policy import ATTENTION_PRODUCTS, Gemm, Layer, Policy, Role
from mxcompile.policy.presets import PRESETS
from mxcompile.policy.values import VERSION
from mxcompile.report.forms.words import count, length
from mxcompile.rules.layers import folded, spelled

_LEAST_BLOCKS = 3


def starter(preset: str, layers: Sequence[Layer], model: str) -> str:
    """Returns the text of a policy file that decides as `preset` for `layers` of the model `model`."""
    policy = Policy.preset(preset)
    linear = [layer for layer in layers if layer.role not in ATTENTION_PRODUCTS]
    products = [layer for layer in layers if layer.role in ATTENTION_PRODUCTS]
    roles = list(dict.fromkeys(layer.role for layer in linear))
    lines = [
        f"# Policy for {printable(model)}: decides as the preset {preset} until you change it.",
        "# For each layer the first rule that matches decides; layers without a rule follow the preset.",
        "# Sizes are of the forward GEMM: m tokens, n output features, k input features.",
        "",
        f"version: {VERSION}",
        f"preset: {preset}  # {', '.join(PRESETS)}",
        "rules:",
    ]
    if max((layer.block.total for layer in linear if layer.block), default=0) >= _LEAST_BLOCKS:
        lines += [
            "  # The first and the last block in BF16, as many recipes have it:",
            "  # - match: {blocks: {first: 1, last: 1}}",
            f"  #   use: {UNQUANTIZED}",
        ]
    for role in roles:
        lines += ["", *_rule(policy, role, [layer for layer in linear if layer.role == role])]
    if products:
        lines += ["", f"  # Attention products stay in BF16: {printable(spelled(products))}"]
    return "\n".join(lines) + "\n"


def _rule(policy: Policy, role: Role, layers: Sequence[Layer]) -> list[str]:
    """Returns the lines of the rule for `role`: its layers as comments, then the preset's decision."""
    decisions = [policy.decide(layer) for layer in layers]
    chosen = {gemm: [decision.choice(gemm).precision for decision in decisions] for gemm in Gemm}
    words = {gemm: next(filter(is_quantized, some), UNQUANTIZED.name) for gemm, some in chosen.items()}
    sent = {gemm: word for gemm, word in words.items() if is_quantized(word)}
    sides = [side for layer in layers for side in (layer.n, layer.k)] if sent else []
    is_small = any(side is not None and side < BLOCK for side in sides)
    sizes = f", min_n: {BLOCK}, min_k: {BLOCK}" if is_small else ""
    if not sent:
        use = UNQUANTIZED.name
    elif len(set(words.values())) == 1:
        use = words[Gemm.FPROP]
    else:
        use = f"{{{', '.join(f'{gemm}: {word}' for gemm, word in sent.items())}}}"
    same = folded(layers)
    lines = [f"  # {role}: {count(sum(row.count for row in same), 'layer')}"]
    for row in same:
        gemm = row.gemms[0]
        owner = f"  {gemm.module}" if gemm.module not in ("", "Linear") else ""
        lengths = f"m={length(gemm.m)} n={length(gemm.n)} k={length(gemm.k)}"
        lines.append(f"  #   {printable(row.name) or '(root)'}  {lengths}{printable(owner)}")
    return [*lines, f"  - match: {{role: {role}{sizes}}}", f"    use: {use}"]
