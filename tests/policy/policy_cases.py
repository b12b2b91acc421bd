"""Broken and valid policy files, by what they try."""

from __future__ import annotations

from dataclasses import dataclass

from mxcompile.formats import PRECISIONS
from mxcompile.policy import ATTENTION_PRODUCTS, Role

ANY_PRECISION = f"expected {', '.join(PRECISIONS)} or a mapping"


@dataclass(frozen=True)
class Broken:
    """A policy file, the line of its mistake (None: the file as a whole), and what the error says.

    nearest: the word a typo was meant to be.
    """

    text: str | bytes
    line: int | None
    piece: str
    nearest: str | None = None


def rules(*lines: str) -> str:
    """A policy with the rules `lines`; the first is in line 3 of the file."""
    return "version: 1\nrules:\n" + "".join(f"  - {line}\n" for line in lines)


def match(value: str) -> str:
    """A policy whose only rule has `value`, in line 3, for its match."""
    return rules(f"match: {value}\n    use: bf16")


def use(value: str) -> str:
    """A policy whose only rule has `value`, in line 3, for its use."""
    return rules(f"use: {value}\n    match: {{role: qkv}}")


def shadowed(*matches: str) -> str:
    """A policy with a rule in BF16 for each of `matches`; the first is in line 3."""
    return rules(*(f"{{match: {text}, use: bf16}}" for text in matches))


def in_match(value: str, piece: str, nearest: str | None = None) -> Broken:
    """A mistake in the match of the only rule."""
    return Broken(match(value), 3, piece, nearest)


def in_use(value: str, piece: str, nearest: str | None = None) -> Broken:
    """A mistake in the use of the only rule."""
    return Broken(use(value), 3, piece, nearest)


def never_fires(first: str, second: str, piece: str = "by rule 1") -> Broken:
    """A second rule whose layers the first decides."""
    return Broken(shadowed(first, second), 4, piece)


def doubling(levels: int) -> str:
    """A list whose last item stands for 2**`levels` others."""
    steps = [f"&a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, levels)]
    return f"[&a0 [x, x], {', '.join(steps)}]"


LINEAR_ROLES = ", ".join(role for role in Role if role not in ATTENTION_PRODUCTS)

KEYS = {
    "typo in a top-level key": Broken("version: 1\nprest: ocp\n", 2, "'prest'", "preset"),
    "plural of a top-level key": Broken("version: 1\nrule: []\n", 2, "'rule'", "rules"),
    "capital in a top-level key": Broken("Version: 1\n", 1, "'Version'", "version"),
    "typo in a rule's key": Broken(rules("mach: {role: qkv}\n    use: bf16"), 3, "'mach'", "match"),
    "typo in a later rule's key": Broken(
        rules("{match: {role: qkv}, use: bf16}", "match: {role: head}\n    uses: bf16"),
        5,
        "rules[1].uses: unknown key 'uses'",
        "use",
    ),
    "typo in a match key": in_match("{roles: qkv}", "'roles'", "role"),
    "typo in a size key": in_match("{min_K: 256}", "'min_K'", "min_k"),
    "typo in a use key": in_use("{precison: bf16}", "'precison'", "precision"),
    "typo in a GEMM": Broken(use("{fprop: bf16,\n      wgard: bf16}"), 4, "'wgard'", "wgrad"),
    "key of another level": in_match("{precision: bf16}", "unknown key 'precision'"),
    "match key at the top": Broken("version: 1\nname: x\n", 2, "unknown key 'name'"),
    "duplicate top-level key": Broken(
        "version: 1\npreset: ocp\npreset: nvidia\n", 3, "duplicate key 'preset', first in line 2"
    ),
    "duplicate key in a rule": Broken(
        rules("match: {role: qkv}\n    use: bf16\n    match: {role: head}"),
        5,
        "duplicate key 'match', first in line 3",
    ),
    "duplicate key in a flow mapping": in_match("{role: qkv, role: head}", "duplicate key"),
    "number for a key": Broken("version: 1\n1: 2\n", 2, "a key must be a word, found '1'"),
    "bool for a key": Broken("version: 1\non: 2\n", 2, "a key must be a word, found 'on'"),
    "null for a key": Broken("version: 1\n~: 2\n", 2, "a key must be a word, found '~'"),
    "list for a key": Broken("version: 1\n? [a]\n: 2\n", 2, "a key must be a word, found a list"),
    "mapping for a key": Broken("{version: 1, {a: b}: 2}", 1, "must be a word, found a mapping"),
    "merge key": Broken(rules("<<: {match: {role: qkv}}\n    use: bf16"), 3, "unknown key '<<'"),
    "key of two lines": Broken('version: 1\n"a\\nb": 1\n', 2, r"unknown key 'a\nb'"),
    "key of symbols": Broken("version: 1\n💥: 1\n", 2, "unknown key '💥'"),
    "misleading letters in a key": Broken("version: 1\npr\u0435set: 1\n", 2, r"'pr\u0435set'", "preset"),
    "a reversed key": Broken("version: 1\n\u202etes: 1\n", 2, r"unknown key '\u202etes'"),
    "a key with a space of no width": Broken(
        "version: 1\npre\u200bset: ocp\n", 2, r"'pre\u200bset'", "preset"
    ),
    "full-width letters in a key": Broken("version: 1\n\uff52ules: []\n", 2, r"'\uff52ules'", "rules"),
    "a byte order mark within": Broken("version: 1\n\ufeffpreset: ocp\n", 2, r"'\ufeffpreset'", "preset"),
}

HIDDEN = {
    "name that reads backwards": in_match('{name: "a.\u202eb"}', "invisible character U+202E: remove it"),
    "name with a space of no width": in_match("{name: [b, a\u200b]}", "name[1]: 'a\\u200b' contains"),
    "name of two lines": in_match(r'{name: "a\nb"}', "the invisible character U+000A"),
}

WORDS = {
    "unknown preset": Broken("version: 1\npreset: nvida\n", 2, "preset 'nvida'", "nvidia"),
    "capitals in a preset": Broken("version: 1\npreset: OCP\n", 2, "preset 'OCP'", "ocp"),
    "unknown role": in_match("{role: qvk}", "unknown role 'qvk'", "qkv"),
    "unknown role in a list": Broken(
        match("{role: [qkv,\n      atn_out]}"), 4, "rules[0].match.role[1]: ", "attn_out"
    ),
    "unknown precision": in_use("mxfq8", "unknown precision 'mxfq8'", "mxfp8"),
    "capitals in a precision": in_use("BF16", "unknown precision 'BF16'", "bf16"),
    "unknown precision of a GEMM": in_use("{dgrad: fp16}", "'fp16'", "bf16"),
    "unknown element type": in_use("{elem_dtype: e4m3fn}", "'e4m3fn'", "e4m3"),
    "unknown gradient type": in_use("{grad_dtype: e5m3}", "'e5m3'", "e5m2"),
    "unknown rounding": in_use("{rounding: rceill}", "'rceill'", "rceil"),
    "unknown weight block": in_use("{weight_block: 32x23}", "'32x23'", "32x32"),
    "unknown operand of 4 over 6": in_use(
        "{precision: nvfp4, four_over_six: {y: 256}}", "use.four_over_six.y: unknown key 'y'", "dy"
    ),
    "unknown largest scale": in_use(
        "{precision: nvfp4, four_over_six: {w: 255}}", "four_over_six.w: unknown largest scale 255", "256"
    ),
    "unknown error of a block": in_use(
        "{precision: nvfp4, four_over_six: {w: 256, error: mse2}}", "unknown error 'mse2'", "mse"
    ),
    "4 over 6 without an operand": in_use(
        "{precision: nvfp4, four_over_six: {error: mae}}", "expected operands and largest scales"
    ),
    "a number for 4 over 6": in_use(
        "{precision: nvfp4, four_over_six: 256}", "such as {x: 256, w: 256}, found 256"
    ),
    "unknown operand with scales of rows": in_use(
        "{precision: nvfp4, row_scaled: [x, w]}", "row_scaled[1]: unknown operand 'w'"
    ),
    "unknown saved form": in_use("{saved: columwise}", "'columwise'", "columnwise"),
    "a word like no other": in_match("{role: zzz}", "unknown role 'zzz'; allowed: qkv, attn_out"),
    "a word of 5,000 letters": in_use("x" * 5000, "unknown precision 'xxx"),
}

TYPES = {
    "a list for the policy": Broken("- version\n", 1, "a policy must be a mapping with the keys version"),
    "a word for the policy": Broken("hello\n", 1, "a policy must be a mapping with the keys version"),
    "word for version": Broken("version: one\n", 1, "policy version 1, found 'one'"),
    "string for version": Broken("version: '1'\n", 1, "policy version 1, found '1'"),
    "fraction for version": Broken("version: 1.0\n", 1, "policy version 1, found 1.0"),
    "bool for version": Broken("version: true\n", 1, "policy version 1, found True"),
    "later version": Broken("preset: ocp\nversion: 2\n", 2, "policy version 1, found 2"),
    "number for preset": Broken("version: 1\npreset: 5\n", 2, "unknown preset 5"),
    "nothing for preset": Broken("version: 1\npreset:\n", 2, "unknown preset None"),
    "list for preset": Broken("version: 1\npreset: [ocp]\n", 2, "unknown preset ['ocp']", "ocp"),
    "mapping for rules": Broken("version: 1\nrules: {match: a}\n", 2, "expected a list of rules"),
    "word for rules": Broken("version: 1\nrules: bf16\n", 2, "expected a list of rules, found str"),
    "word for a rule": Broken(rules("bf16"), 3, "a rule must be a mapping with the keys match, use"),
    "nothing for a rule": Broken(rules(""), 3, "a rule must be a mapping with the keys match, use"),
    "word for match": in_match("qkv", "at least one of name, role, module"),
    "nothing for match": in_match("", "at least one of name, role, module"),
    "list for match": in_match("[{role: qkv}]", "at least one of name, role, module"),
    "empty match": in_match("{}", "at least one of name, role, module"),
    "long list for match": in_match(f"[{'qkv, ' * 3000}]", "at least one of name, role"),
    "number for use": in_use("8", ANY_PRECISION),
    "nothing for use": in_use("", ANY_PRECISION),
    "list for use": in_use("[bf16]", ANY_PRECISION),
    "empty use": in_use("{}", ANY_PRECISION),
    "number for name": in_match("{name: 5}", "expected a glob or 're:…'"),
    "empty name": in_match("{name: ''}", "expected a glob or 're:…'"),
    "list in a list of names": in_match("{name: [a, [b]]}", "rules[0].match.name[1]: expect"),
    "number for role": in_match("{role: 1}", "unknown role 1"),
    "number for module": in_match("{module: 1}", "expected the class name of a module"),
    "path for module": in_match("{module: torch.nn.Linear}", "'torch.nn.Linear'"),
    "empty list of names": in_match("{name: []}", "an empty list matches nothing"),
    "empty list of roles": in_match("{role: []}", "an empty list matches nothing"),
    "empty list of modules": in_match("{module: []}", "an empty list matches nothing"),
    "min_m 0": in_match("{min_m: 0}", "expected a positive integer, found 0"),
    "min_n negative": in_match("{min_n: -1}", "expected a positive integer, found -1"),
    "min_k bool": in_match("{min_k: yes}", "expected a positive integer, found True"),
    "min_k string": in_match("{min_k: '256'}", "expected a positive integer, found '256'"),
    "min_k fraction": in_match("{min_k: 1.5}", "expected a positive integer, found 1.5"),
    "min_k with a unit": in_match("{min_k: 1k}", "expected a positive integer, found '1k'"),
    "min_k list": in_match("{min_k: [1]}", "expected a positive integer, found [1]"),
    "max_k 0": in_match("{max_k: 0}", "expected a positive integer, found 0"),
    "number for blocks": in_match("{blocks: 2}", "expected a mapping with first or last"),
    "empty blocks": in_match("{blocks: {}}", "expected a mapping with first or last"),
    "list for blocks": in_match("{blocks: [first]}", "expected a mapping with first or last"),
    "typo in blocks": in_match(
        "{blocks: {frist: 2}}", "rules[0].match.blocks.frist: unknown key 'frist'", "first"
    ),
    "no first blocks": in_match("{blocks: {first: 0}}", "blocks.first: expected a positive integer, found 0"),
    "a word for the last blocks": in_match(
        "{blocks: {last: all}}", "blocks.last: expected a positive integer, found 'all'"
    ),
    "number for steps": in_match("{steps: 100}", "expected {first: 100}, {last: 10 %, of: 10000} or"),
    "empty steps": in_match("{steps: {}}", "found {}"),
    "steps from both ends": in_match("{steps: {first: 1, last: 2, of: 9}}", "expected {first: 100}"),
    "steps without a begin": in_match("{steps: {until: 9}}", "expected {first: 100}"),
    "typo in steps": in_match(
        "{steps: {frist: 2}}", "rules[0].match.steps.frist: unknown key 'frist'", "first"
    ),
    "no first steps": in_match("{steps: {first: 0}}", "steps.first: expected a positive integer, found 0"),
    "a share of an unknown run": in_match(
        "{steps: {first: 10 %}}", "steps.first: '10 %' needs the number of steps of the whole run"
    ),
    "last steps of an unknown run": in_match(
        "{steps: {last: 10}}", "'last' needs the number of steps of the whole run: add 'of: 10000'"
    ),
    "a negative step": in_match("{steps: {from: -1}}", "steps.from: expected a step, an integer"),
    "min_k of 5,000 digits": in_match(f"{{min_k: {'1' * 5000}}}", "cannot read '1111"),
    "bool for a GEMM": in_use("{fprop: true}", "unknown precision True"),
    "list for an element type": in_use("{elem_dtype: [e4m3]}", "element type", "e4m3"),
    "number for rounding": in_use("{rounding: 1}", "unknown rounding 1"),
    "number for a weight block": in_use("{weight_block: 16}", "unknown weight block 16", "1x16"),
    "bool for saved": in_use("{saved: false}", "unknown saved form False"),
}

MISSING = {
    "empty file": Broken("", None, "found nothing"),
    "comments only": Broken("# version: 1\n", None, "found nothing"),
    "no version": Broken("preset: ocp\n", 1, "the key 'version' is missing: add 'version: 1'"),
    "no match": Broken(rules("use: bf16"), 3, "rules[0]: the key 'match' is missing"),
    "no use": Broken(rules("match: {role: qkv}"), 3, "rules[0]: the key 'use' is missing"),
}

MEANING = {
    "a precision for a backward without one": in_use(
        "{precision: bf16, backward: dequantised}", "unknown backward 'dequantised'", "dequantized"
    ),
    "a quantized GEMM of a dequantized backward": in_use(
        "{fprop: mxfp8, dgrad: mxfp8, backward: dequantized}",
        "use.dgrad: 'backward: dequantized' leaves dgrad and wgrad in the model's dtype: remove dgrad",
    ),
    "more than the run": in_match("{steps: {last: 10, of: 5}}", "steps.last: a run of 5 steps has no 10"),
    "more than all steps": in_match(
        "{steps: {last: 101 %, of: 5}}", "steps.last: expected more than 0 % and at most 100 %"
    ),
    "an empty range of steps": in_match(
        "{steps: {from: 9, until: 9}}", "steps.until: no step is at least 9 and less than 9"
    ),
    "no size between": in_match(
        "{min_k: 65, max_k: 64}", "match.max_k: no size is at least min_k 65 and at most max_k 64"
    ),
    "precision and one GEMM": Broken(
        use("{precision: mxfp8,\n      fprop: bf16}"), 4, "either 'precision' for all three GEMMs or fprop"
    ),
    "precision and two GEMMs": in_use(
        "{dgrad: bf16, wgrad: bf16, precision: mxfp8}", "or dgrad, wgrad, not both"
    ),
    "attention scores in MXFP8": Broken(
        rules("match: {role: attn_scores}\n    use: mxfp8"), 3, "attn_scores is an attention product"
    ),
    "attention values in MXFP8 for one GEMM": Broken(
        rules("match:\n      role: [qkv, attn_values]\n    use: {fprop: mxfp8}"),
        4,
        "attn_values is an attention product, which stays in BF16",
    ),
    "bad regular expression": in_match("{name: 're:(up|gate'}", "unterminated subpattern"),
    "bad regular expression in a list": Broken(
        match("{name: [a,\n      're:*']}"), 4, "name[1]: 're:*' is not a regular expression"
    ),
    "repetition beyond counting": in_match(
        "{name: 're:a{99999999999999999999}'}", "is not a regular expression"
    ),
    "regular expression too deep": in_match(
        f"{{name: 're:{'(' * 3000}{')' * 3000}'}}", "is not a regular expression"
    ),
}

SHADOWED = {
    "by '*'": never_fires(
        "{name: '*'}", "{role: qkv}", "all its layers are decided by rule 1 (line 3); move it up"
    ),
    "by a glob": never_fires("{name: 'model.*'}", "{name: 'model.layers.*'}"),
    "by a glob that has its name": never_fires("{name: 'a.?'}", "{name: a.b}"),
    "by an equal glob": never_fires("{name: 'a.[bc]'}", "{name: 'a.[bc]'}"),
    "by an equal regular expression": never_fires("{name: 're:a|b'}", "{name: 're:a|b', min_k: 64}"),
    "by a regular expression that has its name": never_fires("{name: 're:a\\..*'}", "{name: a.b}"),
    "by a list of names": never_fires("{name: [a, b, c]}", "{name: [c, a]}"),
    "by a list of roles": never_fires("{role: [qkv, head]}", "{role: head}"),
    "by a list of modules": never_fires("{module: [A, B]}", "{module: B}"),
    "by a smaller min_k": never_fires("{role: qkv, min_k: 64}", "{role: qkv, min_k: 65}"),
    "by a rule without a size": never_fires("{role: qkv}", "{role: qkv, min_m: 8}"),
    "by every role together": never_fires(
        f"{{role: [{LINEAR_ROLES}]}}", "{name: x}", "rule 2 can never fire"
    ),
    "by several rules together": Broken(
        shadowed("{role: qkv}", "{name: a}", "{role: head}", "{role: [qkv, head], min_n: 2}"),
        6,
        "rule 4 can never fire, because all its layers are decided by rules 1, 3 (lines 3, 5); move it up",
    ),
    "by names and roles of several rules": Broken(
        shadowed("{name: 'a*'}", "{name: 'b*', role: qkv}", "{name: [ab, bc], role: qkv}"), 5, "by rules 1, 2"
    ),
    "by more of the first blocks": never_fires(
        "{blocks: {first: 2, last: 1}}", "{blocks: {first: 2}, role: qkv}", "by rule 1"
    ),
    "by both ends one by one": Broken(
        shadowed("{blocks: {first: 2}}", "{blocks: {last: 3}}", "{blocks: {first: 1, last: 3}}"),
        5,
        "by rules 1, 2",
    ),
    "by a rule without blocks": never_fires("{role: qkv}", "{role: qkv, blocks: {last: 1}}"),
    "by more steps": never_fires("{steps: {first: 9}}", "{steps: {first: 5}, role: qkv}"),
    "by all steps": never_fires("{role: qkv}", "{role: qkv, steps: {from: 5}}"),
    "by a larger max_n": never_fires("{max_n: 64}", "{max_n: 64, min_n: 8}"),
    "by its own anchor": Broken(
        rules("&rule {match: {role: qkv}, use: bf16}", "*rule"), 4, "rules[1]: rule 2 can never"
    ),
}

EXECUTABLE = {
    "shell command": Broken(
        "version: 1\npreset: !!python/object/apply:os.system ['touch executed']\n",
        2,
        "the tag !!python/object/apply:os.system is not allowed: a policy is plain data",
    ),
    "call for the whole": Broken(
        "!!python/object/apply:os.mkdir {args: [executed]}\n", 1, "os.mkdir is not allowed"
    ),
    "call in a rule": in_match(
        "{name: !!python/object/apply:os.mkdir [executed]}", "os.mkdir is not allowed"
    ),
    "call for a key": Broken(
        "version: 1\n? !!python/object/apply:os.mkdir [executed]\n: 1\n", 2, "a key must be a word"
    ),
}

TAGS = {
    "object": in_match("!!python/object:pathlib.Path {}", "!!python/object:pathlib.Path"),
    "new object": in_use("!!python/object/new:list [[]]", "!!python/object/new:list is not"),
    "name": Broken("version: !!python/name:os.system 1\n", 1, "!!python/name:os.system is not all"),
    "module": Broken("version: !!python/module:os 1\n", 1, "!!python/module:os is not allowed"),
    "tuple": in_match("{role: !!python/tuple [qkv]}", "!!python/tuple is not allowed"),
    "local tag": Broken("version: 1\npreset: !env PRESET\n", 2, "the tag !env is not allowed"),
    "verbatim tag": Broken("version: !<tag:example.com,2024:x> 1\n", 1, "tag:example.com,2024:x"),
    "undeclared handle": Broken("version: !e!x 1\n", 1, "found undefined tag handle '!e!'"),
    "set": in_match("!!set {role}", "!!set is not allowed"),
    "binary": in_match("{name: !!binary YQ==}", "!!binary is not allowed"),
    "tag on a key": Broken("!env version: 1\n", 1, "the tag !env is not allowed"),
    "word as bool": in_match("{min_k: !!bool many}", "cannot read 'many' as !!bool"),
    "nothing as integer": in_match("{min_k: !!int ''}", "cannot read '' as !!int"),
    "word as float": in_match("{min_k: !!float many}", "cannot read 'many' as !!float"),
}

SYNTAX = {
    "tab for indentation": Broken("version: 1\nrules:\n\t- use: bf16\n", 3, r"found character '\t'"),
    "two documents": Broken("version: 1\n---\nversion: 1\n", 2, "found another document"),
    "bracket left open": Broken("version: 1\nrules: [\n", 3, "not valid YAML"),
    "quote left open": Broken("version: 1\npreset: 'ocp\n", 3, "found unexpected end of stream"),
    "indentation off": Broken("version: 1\n  preset: ocp\n", 2, "mapping values are not allowed"),
    "colon without a space": Broken("version:1\n", 1, "a policy must be a mapping"),
    "glob without quotes": in_match("{name: *.mlp}", "quote a glob that starts with '*'"),
    "word like an alias": in_match("{name: *mlp}", "quote a glob that starts with '*'"),
    "Latin-1 bytes": Broken(b"version: 1\n# caf\xe9\n", 2, "not UTF-8 text"),
    "UTF-16": Broken("version: 1\n".encode("utf-16"), 1, "not UTF-8 text"),
    "a picture": Broken(b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", 1, "not UTF-8 text"),
    "a NUL": Broken("version: 1\npreset: o\0cp\n", 2, "the character U+0000 is not allowed"),
    "an escape sequence": Broken("version: 1\n\n\x1b[31m\n", 3, "the character U+001B is not allowed"),
}

LIMITS = {
    "list inside itself": Broken(
        "version: 1\nrules: &a [*a]\n", 2, "an alias refers to a value that contains it"
    ),
    "rule inside itself": Broken(
        rules("&a\n    match: *a\n    use: bf16"), 4, "an alias refers to a value that contains it"
    ),
    "mapping that is its own key": Broken("&a {*a : 1}\n", 1, "a key must be a word, found a mapping"),
    "alias bomb": Broken(f"version: 1\nrules: {doubling(60)}\n", 2, "more than 20,000 values"),
    "alias bomb for a key": Broken(f"? {doubling(60)}\n: 1\n", 1, "a key must be a word"),
    "too many values": Broken(f"version: 1\nrules: [{'a, ' * 80_000}]\n", 2, "more than 20,000 values"),
    "too many rules": Broken(rules(*("{match: {name: a}, use: bf16}",) * 4000), 2859, "more than 20,000"),
    "10 MB": Broken(b"#" * 10_000_000, None, "at most 262,144 bytes"),
    "25 levels": Broken("version: 1\nrules:\n  " + "[" * 25 + "]" * 25, 3, "more than 20 deep"),
    "10,000 levels": Broken("version: " + "[" * 10_000, None, "more than 20 deep"),
}

CORPUS = {
    f"{family}: {name}": broken
    for family, cases in {
        "keys": KEYS,
        "words": WORDS,
        "types": TYPES,
        "missing": MISSING,
        "meaning": MEANING,
        "shadowed": SHADOWED,
        "hidden": HIDDEN,
        "executable": EXECUTABLE,
        "tags": TAGS,
        "syntax": SYNTAX,
        "limits": LIMITS,
    }.items()
    for name, broken in cases.items()
}

VALID = {
    "nothing but a version": ("version: 1\n", 0),
    "rules left empty": ("version: 1\nrules:\n", 0),
    "a byte order mark": ("\ufeffversion: 1\npreset: ocp\n", 0),
    "Windows line ends": ("version: 1\r\nrules: []\r\n", 0),
    "a date for a name": (match("{name: 2024-01-01}"), 1),
    "a repeated role": (match("{role: [qkv, qkv]}"), 1),
    "a shared use": (
        rules(
            "{match: {role: qkv}, use: &fast {precision: mxfp8, saved: transcode}}",
            "{match: {role: ffn_in}, use: *fast}",
        ),
        2,
    ),
    "attention products in BF16": (shadowed("{role: [attn_scores, attn_values]}"), 1),
    "a part before the whole": (shadowed("{name: 'model.layers.*'}", "{name: 'model.*'}"), 2),
    "globs that overlap": (shadowed("{name: 'a.*'}", "{name: '*.b'}"), 2),
    "a glob in the middle": (shadowed("{name: 'a.*.c'}", "{name: 'a.*'}"), 2),
    "one character before any": (shadowed("{name: 'a.?'}", "{name: 'a.*'}"), 2),
    "sets of characters": (shadowed("{name: 'a.[0-9]'}", "{name: 'a.[0-5]'}"), 2),
    "a glob like a regular expression": (shadowed("{name: 'a.*'}", "{name: 're:a.*'}"), 2),
    "regular expressions that overlap": (shadowed("{name: 're:a.*'}", "{name: 're:.*b'}"), 2),
    "role lists that overlap": (shadowed("{role: [qkv, head]}", "{role: [head, router]}"), 2),
    "one role, then all": (shadowed("{role: qkv}", "{name: '*'}"), 2),
    "all roles but one, then all": (
        shadowed(f"{{role: [{LINEAR_ROLES.removeprefix('qkv, ')}]}}", "{name: '*'}"),
        2,
    ),
    "module classes that differ": (shadowed("{module: Linear}", "{module: Conv1D}"), 2),
    "a class, then any": (shadowed("{module: Linear}", "{name: '*'}"), 2),
    "a larger min_k first": (shadowed("{role: qkv, min_k: 256}", "{role: qkv, min_k: 64}"), 2),
    "sizes that cross": (
        shadowed("{role: qkv, min_k: 64, min_m: 8}", "{role: qkv, min_k: 128, min_m: 4}"),
        2,
    ),
    "more blocks later": (shadowed("{blocks: {first: 1}}", "{blocks: {first: 2}}"), 2),
    "one end, then both": (shadowed("{blocks: {first: 2}}", "{blocks: {first: 2, last: 1}}"), 2),
    "blocks, then all": (shadowed("{blocks: {first: 99, last: 99}}", "{name: '*'}"), 2),
    "more steps later": (shadowed("{steps: {first: 5}}", "{steps: {first: 6}}"), 2),
    "some steps, then all": (shadowed("{steps: {from: 0}}", "{name: '*'}"), 2),
    "a larger max_k later": (shadowed("{max_k: 64}", "{max_k: 65}"), 2),
    "a largest size, then any": (shadowed("{max_m: 64}", "{role: qkv}"), 2),
    "the least is the largest": (match("{min_k: 64, max_k: 64}"), 1),
    "names and roles that cross": (
        shadowed("{name: a, role: qkv}", "{name: b, role: head}", "{name: [a, b], role: head}"),
        3,
    ),
}
