"""The policy language as JSON Schema (draft 2020-12), for editors that complete and check YAML.

It is generated from the tables that `parse` reads (`schema`) and published as policy.schema.json. It covers
keys, words and types. It does not cover shadowed rules, invalid regular expressions and duplicate keys.
"""

from __future__ import annotations

import json
from pathlib import Path

from mxcompile.formats import PRECISIONS
from mxcompile.policy import schema
from mxcompile.policy.model import Gemm
from mxcompile.policy.roles import ATTENTION_PRODUCTS
from mxcompile.policy.values import PRECISION, VERSION_VALUE, mapping

PATH = Path(__file__).with_name("policy.schema.json")
"""The published schema, equal to `text`."""


def text() -> str:
    """Returns the schema as JSON text."""
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
    rule = mapping(parts, required=list(schema.RULE)) | {
        # attention products stay in BF16
        "if": {"properties": {"match": {"properties": {"role": named}, "required": ["role"]}}},
        "then": {"properties": {"use": {"not": {"anyOf": [quantized, asks]}}}},
    }
    match = {
        "description": "Selects layers: a layer must match every key.",
        **mapping({key: value.json for key, value in schema.MATCH.items()}, minProperties=1),
    }
    one_gemm = {"anyOf": [{"required": [str(gemm)]} for gemm in Gemm]}
    needs = {key: [value.needs[0]] for key, value in schema.USE.items() if value.needs is not None}
    use = {
        "description": "One precision for all three GEMMs, or settings to change; the rest follows the"
        " preset.",
        "anyOf": [
            PRECISION.json,
            mapping({key: value.json for key, value in schema.USE.items()}, minProperties=1)
            | {
                "dependentSchemas": {"precision": {"not": one_gemm}},
                "dependentRequired": needs,
            },
        ],
    }
    policy = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "mxcompile policy",
        "description": "Selects the GEMMs that run in MXFP8, and their formats. For each layer the first"
        " rule that matches decides; where none does, the preset.",
        **mapping(
            {"version": VERSION_VALUE.json, "preset": schema.PRESET.json, "rules": rules},
            required=["version"],
        ),
        "$defs": {"rule": rule, "match": match, "use": use},
    }
    return json.dumps(policy, indent=2, ensure_ascii=False) + "\n"
