"""Where policies come from, and that one survives being written and read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.policies import policy, rule
from hypothesis import given, settings
from hypothesis import strategies as st

from mxcompile.errors import PolicyError
from mxcompile.formats import E4M3, E5M2, NO_HADAMARD, PRECISIONS, Rounding, Tile
from mxcompile.formats.elements import INT8
from mxcompile.policy import ATTENTION_PRODUCTS, Ends, Match, Policy, Role, Rule, Saved, StepRange, Use
from mxcompile.policy.presets import PRESETS
from mxcompile.policy.schema import keys_of
from mxcompile.policy.shadow import Shadows


def test_none_is_the_default_preset():
    assert Policy.resolve(None) == Policy.preset("nvidia") == Policy()


@pytest.mark.parametrize("name", PRESETS)
def test_name_of_a_preset_resolves_to_it(name: str):
    resolved = Policy.resolve(name)
    assert resolved == Policy.preset(name) == policy(preset=name)
    assert resolved.label == f"preset {name}"


def test_resolved_policy_is_the_same_object():
    original = policy(rule(role="head"))
    assert Policy.resolve(original) is original


def test_a_dict_is_read_as_a_file_is(tmp_path: Path):
    original = policy(rule({"fprop": "mxfp8", "rounding": "even"}, name=["a", "b.*"], min_k=32))
    path = tmp_path / "policy.yaml"
    original.dump(path)
    assert Policy.resolve(original.to_dict()) == Policy.resolve(path) == Policy.resolve(str(path)) == original
    assert Policy.resolve(path).label == str(path)


def test_a_file_of_any_name_is_read(tmp_path: Path):
    path = tmp_path / "settings"
    path.write_text("version: 1\npreset: hybrid\n")
    assert Policy.resolve(str(path)) == Policy.preset("hybrid")


def test_a_file_does_not_hide_a_preset(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ocp").write_text("version: 1\npreset: hybrid\n")
    assert Policy.resolve("ocp") == Policy.preset("ocp")
    assert Policy.resolve("./ocp") == Policy.preset("hybrid")


@pytest.mark.parametrize(
    ("value", "piece"),
    [
        ("nvdia", "unknown preset 'nvdia' (did you mean 'nvidia'?); allowed: nvidia, ocp"),
        ("no_such_file", "and no such file"),
        ("no_such_file.yaml", "no_such_file.yaml: cannot be read: No such file or directory"),
        (Path("no_such_file.yml"), "no_such_file.yml: cannot be read"),
        ("no\0such.yaml", "cannot be read: embedded null byte"),
        ("version: 1\nrules: []\n" + "# a policy is not its text\n" * 200, "no such file"),
        (5, "a file path, a preset name, a dict or a Policy, found int"),
        (["nvidia"], "a file path, a preset name, a dict or a Policy, found list"),
        (
            {"version": 1, "prest": "ocp"},
            "policy: prest: unknown key 'prest' (did you mean 'preset'",
        ),
        ({}, "policy: the key 'version' is missing"),
        ({None: 1}, "unknown key None"),
        ({"version": 1, ("a", "b"): 1}, "unknown key ('a', 'b')"),
    ],
)
def test_value_that_is_not_a_policy_raises(value: Any, piece: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PolicyError) as caught:
        Policy.resolve(value)
    assert piece in str(caught.value)
    assert len(str(caught.value)) < 400


ANY_PRECISION = st.none() | st.sampled_from(list(PRECISIONS.values()))
TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc", "Cf"]), min_size=1, max_size=12)
PATTERNS = st.one_of(
    st.from_regex(r"[a-z*?]{1,4}(\.[a-z0-9*?]{1,4}){0,3}", fullmatch=True),
    st.from_regex(r"re:[a-z]{1,3}(\\\.|\.\*|\|)[a-z]{1,3}", fullmatch=True),
    TEXT.filter(lambda text: not text.startswith("re:")),
)
MATCHES = st.builds(
    Match,
    name=st.lists(PATTERNS, max_size=3, unique=True).map(tuple),
    role=st.lists(st.sampled_from(Role), max_size=4, unique=True).map(tuple),
    module=st.lists(st.sampled_from(["Linear", "Conv1D", "_Fused"]), max_size=2, unique=True).map(tuple),
    min_m=st.integers(0, 1 << 40),
    min_n=st.integers(0, 2),
    min_k=st.integers(0, 2),
    max_n=st.sampled_from([0, 2, 3]),
    max_k=st.sampled_from([0, 2, 3]),
    blocks=st.none() | st.builds(Ends, first=st.integers(0, 2), last=st.integers(1, 2)),
    steps=st.none() | st.builds(StepRange, start=st.integers(0, 9), stop=st.none() | st.integers(10, 12)),
).filter(lambda match: match != Match())


def means_something(use: Use) -> bool:
    """Whether every choice of `use` is one that a precision it names has; every preset's if it names none."""
    rows = [row for row in (use.fprop, use.dgrad, use.wgrad) if row is not None and row.quantizes]
    keys = set().union(*map(keys_of, rows))
    if not rows:
        keys = frozenset.intersection(*(keys_of(preset.precision) for preset in PRESETS.values()))
    choices = {
        key
        for key in ("elem_dtype", "grad_dtype", "rounding", "weight_block", "hadamard")
        if getattr(use, key) is not None
    }
    blocks = {None, *(block for row in rows for block in row.weight_blocks)}
    grads = {None, *(elem for row in rows for elem in row.grad_elems)}
    return choices <= keys and use.weight_block in blocks and use.grad_dtype in grads


USES = st.builds(
    Use,
    fprop=ANY_PRECISION,
    dgrad=ANY_PRECISION,
    wgrad=ANY_PRECISION,
    elem_dtype=st.none() | st.sampled_from([E4M3, E5M2]),
    grad_dtype=st.none() | st.sampled_from([E4M3, E5M2, INT8]),
    rounding=st.none() | st.sampled_from(Rounding),
    weight_block=st.none() | st.sampled_from([Tile.ROW, Tile.SQUARE, Tile(16, 16)]),
    hadamard=st.none() | st.sampled_from([NO_HADAMARD, 0, 0xFFFF]),
    saved=st.none() | st.sampled_from(Saved),
).filter(lambda use: use != Use() and means_something(use))


def readable(rules: list[Rule]) -> tuple[Rule, ...]:
    """`rules` without those that a policy file may not hold."""
    kept: list[Rule] = []
    shadows = Shadows()
    for candidate in rules:
        quantizes_products = candidate.use.quantizes and ATTENTION_PRODUCTS & {*candidate.match.role}
        if not quantizes_products and not shadows.add(candidate.match):
            kept.append(candidate)
    return tuple(kept)


POLICIES = st.builds(
    lambda preset, rules: Policy(base=PRESETS[preset], rules=readable(rules)),
    st.sampled_from(list(PRESETS)),
    st.lists(st.builds(Rule, match=MATCHES, use=USES), max_size=4),
)


@settings(max_examples=150, deadline=None)
@given(original=POLICIES)
def test_a_policy_survives_being_written_and_read(original: Policy, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    original.dump(path)
    reloaded = Policy.load(path)
    assert reloaded == original
    assert reloaded.to_dict() == original.to_dict() == Policy.from_dict(original.to_dict()).to_dict()


@settings(max_examples=150, deadline=None)
@given(first=POLICIES, other=POLICIES)
def test_fingerprints_are_equal_as_policies_are(first: Policy, other: Policy):
    assert (first.fingerprint() == other.fingerprint()) == (first == other)


@settings(max_examples=50, deadline=None)
@given(original=POLICIES)
def test_a_fingerprint_does_not_depend_on_where_the_policy_came_from(original: Policy):
    assert Policy.from_dict(original.to_dict(), label="elsewhere").fingerprint() == original.fingerprint()


@pytest.mark.parametrize(
    ("written", "shortest"),
    [
        ("bf16", "bf16"),
        ({"precision": "mxfp8"}, "mxfp8"),
        ({"fprop": "bf16", "dgrad": "bf16", "wgrad": "bf16"}, "bf16"),
        (
            {"rounding": "floor", "wgrad": "mxfp8", "dgrad": "mxfp8", "fprop": "mxfp8"},
            {"precision": "mxfp8", "rounding": "floor"},
        ),
        ({"fprop": "mxfp8", "dgrad": "mxfp8"}, {"fprop": "mxfp8", "dgrad": "mxfp8"}),
        (
            {"fprop": "mxfp8", "dgrad": "mxfp8", "wgrad": "bf16"},
            {"fprop": "mxfp8", "dgrad": "mxfp8", "wgrad": "bf16"},
        ),
        ({"grad_dtype": "e5m2"}, {"grad_dtype": "e5m2"}),
    ],
)
def test_a_use_is_written_in_its_shortest_form(written: Any, shortest: Any):
    (written_rule,) = policy(rule(written, role="qkv")).to_dict()["rules"]
    assert written_rule == {"match": {"role": "qkv"}, "use": shortest}


def test_a_dumped_file_reads_as_a_person_would_write_it(tmp_path: Path):
    path = tmp_path / "policy.yaml"
    policy(
        rule("bf16", name="model.layers.0.*"),
        rule({"precision": "mxfp8", "weight_block": "32x32"}, role=["qkv", "attn_out"], min_k=256),
        preset="nvidia",
    ).dump(path)
    assert path.read_text() == (
        "version: 1\n"
        "preset: nvidia\n"
        "rules:\n"
        "- match:\n"
        "    name: model.layers.0.*\n"
        "  use: bf16\n"
        "- match:\n"
        "    role:\n"
        "    - qkv\n"
        "    - attn_out\n"
        "    min_k: 256\n"
        "  use:\n"
        "    precision: mxfp8\n"
        "    weight_block: 32x32\n"
    )
