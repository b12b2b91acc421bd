"""The table of policy keys, the source of `parse`, `Policy.to_dict` and the published policy.schema.json.

A key of a rule is also a field of `Match` or `Use`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mxcompile.formats import PRECISIONS, ElemRounding, ElemType, Precision, Rounding, Scales, ScaleType
from mxcompile.policy import values
from mxcompile.policy.model import Backward, Gemm, Saved, Sent
from mxcompile.policy.presets import PRESETS
from mxcompile.policy.roles import ATTENTION_PRODUCTS, Role
from mxcompile.policy.values import Value, listed, table, word


def _delays(row: Precision) -> bool:
    return any(tiles.delayed for tiles in row.tiles.values())


def _scaled_by(scale: ScaleType) -> Callable[[Precision], bool]:
    return lambda row: row.quantizes and row.scale is scale


def _elem_words(elems_of: Callable[[Precision], tuple[ElemType, ...]]) -> Value:
    """Returns the `Value` of a key for an element type. Precisions with one type in `elems_of` lack it."""
    several = [elems for elems in map(elems_of, PRECISIONS.values()) if len(elems) > 1]
    words = {elem.name: elem for elems in several for elem in elems}
    return replace(word("element type", words), means=lambda row: len(elems_of(row)) > 1, allowed=elems_of)


MATCH: dict[str, Value] = {
    "name": listed(values.NAME_PATTERN).says(
        "Glob over the whole module path, '*' crosses dots; or 're:' and a full-match regular expression."
    ),
    "role": listed(word("role", table(Role))).says(
        "Function of the layer, found from the graph's structure."
    ),
    "module": listed(values.CLASS_NAME).says("Class name of the module that runs the layer."),
    "blocks": values.ENDS.says("In the first or last repeated blocks of the model, of every stack of them."),
    "steps": values.STEP_RANGE.says(
        "In these training steps: first, last with of (the steps of the run), or from with until."
    ),
    "min_m": values.POSITIVE.says("Least number of tokens of the forward GEMM."),
    "min_n": values.POSITIVE.says("Least number of output features."),
    "min_k": values.POSITIVE.says("Least number of input features."),
    "max_m": values.POSITIVE.says("Largest number of tokens of the forward GEMM."),
    "max_n": values.POSITIVE.says("Largest number of output features."),
    "max_k": values.POSITIVE.says("Largest number of input features."),
}

USE: dict[str, Value] = {
    "precision": values.PRECISION.says("Precision of all three GEMMs."),
    "fprop": values.PRECISION.says("Precision of y = x·Wᵀ."),
    "dgrad": values.PRECISION.says("Precision of dx = dy·W."),
    "wgrad": values.PRECISION.says("Precision of dW = dyᵀ·x."),
    "elem_dtype": _elem_words(lambda row: row.elems).says("Element type of input and weight."),
    "grad_dtype": _elem_words(lambda row: row.grad_elems).says("Element type of the output gradient."),
    "rounding": word("rounding", table(Rounding)).says(
        "Rounding of a block's scale, which follows from its largest value.", means=_scaled_by(ScaleType.E8M0)
    ),
    "grad_rounding": word("rounding of elements", table(ElemRounding)).says(
        "Rounding of the output gradient's elements; stochastic is unbiased, and reproducible under a seed.",
        means=lambda row: row.quantizes,
    ),
    "weight_block": word("weight block", table(values.WEIGHT_BLOCKS)).says(
        "32x32 of mxfp8, 16x16 of nvfp4: one copy of the weight serves fprop and dgrad.",
        means=lambda row: bool(row.weight_blocks),
        allowed=lambda row: row.weight_blocks,
    ),
    "block": values.BLOCK.says(
        "Elements along the contraction that share a scale.",
        means=lambda row: row.tiles_key == "block" and len(row.tiles) > 1,
    ),
    "scaling": word("scaling", table(values.tile_choices("scaling"))).says(
        "Elements that share an FP32 scale: the tensor, a row along the contraction, or a block.",
        means=lambda row: row.tiles_key == "scaling" and len(row.tiles) > 1,
    ),
    "scale": word("scale", table(Scales)).says(
        "Scales of fp8: any FP32 number, or powers of two, rounded up.", means=_scaled_by(ScaleType.FP32)
    ),
    "history": values.POSITIVE.says(
        "With scaling: delayed, number of calls whose largest magnitudes set a scale.",
        means=_delays,
        needs=("scaling", "delayed"),
    ),
    "margin": values.MARGIN.says(
        "With scaling: delayed, powers of two by which a scale exceeds its history.",
        means=_delays,
        needs=("scaling", "delayed"),
    ),
    "amax": values.AMAX.says(
        "Statistic that replaces the largest magnitude in a scale; larger elements saturate.",
        means=lambda row: row.quantizes,
    ),
    "hadamard": values.HADAMARD.says(
        "With nvfp4, signs of the random Hadamard transform of wgrad's operands, 16 bits; false: none.",
        means=_scaled_by(ScaleType.E4M3),
    ),
    "four_over_six": values.FOUR_OVER_SIX.says(
        "Of nvfp4: operands whose blocks take the better of two scales, under which the largest value becomes"
        " 6 or 4, and the largest scale of each, 256 or 448; error: how it is measured.",
        means=_scaled_by(ScaleType.E4M3),
    ),
    "row_scaled": listed(word("operand", table(("x", "dy")))).says(
        "Of nvfp4: operands with an FP32 scale for each row along the contraction, in place of the tensor's.",
        means=_scaled_by(ScaleType.E4M3),
    ),
    "backward": word("backward", table(Backward)).says(
        "dequantized: dgrad and wgrad multiply the dequantized operands of fprop, in the model's dtype."
    ),
    "saved": word("saved form", table(Saved)).says(
        "Form in which the input is saved for backward; mxfp8: also tensors that it is computed from."
    ),
    "sent": word("sent form", table(Sent)).says(
        "Form in which ranks send input and output gradient; mxfp8: wgrad casts the received values."
    ),
}


def keys_of(row: Precision) -> frozenset[str]:
    """Returns the keys of `USE` that are specific to some precisions and apply to `row`."""
    return frozenset(key for key, value in USE.items() if value.means is not None and value.means(row))


PRESET = word("preset", PRESETS).says("Preset that decides where no rule matches.")

TOP = ("version", "preset", "rules")
RULE = ("match", "use")

PATH = Path(__file__).with_name("policy.schema.json")
"""The published schema, equal to `json_schema`."""


def json_schema() -> str:
    """Returns the policy language as JSON Schema (draft 2020-12), for editors that complete and check YAML.

    It covers keys, words and types. It does not cover shadowed rules, invalid regular expressions and
    duplicate keys.
    """
    rules = {
        "description": "In order; the first that matches a layer decides.",
        "type": ["array", "null"],
        "items": {"$ref": "#/$defs/rule"},
    }
    products = {"enum": [str(role) for role in sorted(ATTENTION_PRODUCTS)]}
    named = {"anyOf": [products, {"type": "array", "contains": products}]}
    quantized = {"enum": [row.name for row in PRECISIONS.values() if row.quantizes]}
    keys = ("precision", *map(str, Gemm))
    asks = {"type": "object", "anyOf": [{"properties": {key: quantized}, "required": [key]} for key in keys]}
    parts = {"match": {"$ref": "#/$defs/match"}, "use": {"$ref": "#/$defs/use"}}
    rule = values.mapping(parts, required=list(RULE)) | {
        # attention products stay in BF16
        "if": {"properties": {"match": {"properties": {"role": named}, "required": ["role"]}}},
        "then": {"properties": {"use": {"not": {"anyOf": [quantized, asks]}}}},
    }
    match = {
        "description": "Selects layers: a layer must match every key.",
        **values.mapping({key: value.json for key, value in MATCH.items()}, minProperties=1),
    }
    one_gemm = {"anyOf": [{"required": [str(gemm)]} for gemm in Gemm]}
    settings = values.mapping({key: value.json for key, value in USE.items()}, minProperties=1) | {
        "dependentSchemas": {"precision": {"not": one_gemm}},
        "dependentRequired": {key: [value.needs[0]] for key, value in USE.items() if value.needs is not None},
    }
    use = {
        "description": "One precision for all three GEMMs, or settings to change; the rest follows the"
        " preset.",
        "anyOf": [values.PRECISION.json, settings],
    }
    top = {"version": values.VERSION_VALUE.json, "preset": PRESET.json, "rules": rules}
    policy = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "mxcompile policy",
        "description": "Selects the GEMMs that run in MXFP8, and their formats. For each layer the first"
        " rule that matches decides; where none does, the preset.",
        **values.mapping(top, required=["version"]),
        "$defs": {"rule": rule, "match": match, "use": use},
    }
    return json.dumps(policy, indent=2, ensure_ascii=False) + "\n"
