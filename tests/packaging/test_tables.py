"""Roles, keys of policies, formats and attention operators are rows of tables: few other files name one.

The lists in docs/extend.md are as long as these counts say.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from mxcompile.graph.attention import ATTENTION_FORWARD
from mxcompile.policy import Gemm, Role, schema

ROOT = Path(__file__).parents[2]
PRODUCT = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for tree in ("mxcompile", "passes", "lowering")
    for path in (ROOT / tree).rglob("*")  # which goes through no link
    if path.suffix in (".py", ".json", ".html")
}
POLICY = "mxcompile/policy/"
SCHEMA = POLICY + "policy.schema.json"
CANDIDATES = "mxcompile/analysis/study/mixes.py"

ROLE_READERS = {
    Role.EMBEDDING: {"passes/weights.py", "mxcompile/serving/plan.py"},  # lookups, which are no products
    Role.CONDITIONING: {"passes/roles/site.py"},
    Role.EXPERT_OUT: {"passes/roles/attention.py"},
    Role.HEAD: {"passes/roles/precedence.py"},
}
"""Files that act on one role, beside its row and its statement."""

KEY_READERS = {
    "amax": {POLICY + "parse.py"},
    "backward": {POLICY + "parse.py"},
    "block": {POLICY + "parse.py", POLICY + "values.py", POLICY + "model.py", CANDIDATES},  # and of a layer
    "scaling": {CANDIDATES},
    "weight_block": {POLICY + "parse.py"},
    "grad_dtype": {POLICY + "values.py"},
}
"""Files that read one key for a message, beside its row and its field."""


FORMAT_READERS = {
    "the integer of MXINT8": (
        r"\bINT8\b|\bMXINT8 =|\"mxint8\"|\.is_integer\b",
        {"mxcompile/formats/" + name for name in ("elements.py", "precisions.py", "encoding.py")}
        | {"mxcompile/policy/presets.py", SCHEMA, "mxcompile/report/report.schema.json"}
        | {"lowering/inductor/elements.py", "lowering/inductor/stochastic.py"}
        | {"mxcompile/checkpoint/weight_entries.py", "mxcompile/checkpoint/declared.py"}
        | {"lowering/choices/families.py"},
    ),
    "the choice between two scales": (
        r"\bfour_over_six\b",
        {"mxcompile/formats/" + name for name in ("types.py", "encoding.py", "two_level.py", "precisions.py")}
        | {POLICY + name for name in ("values.py", "schema.py", "importers/recipes.py")}
        | {SCHEMA, "lowering/inductor/two_level.py"},
    ),
    "a scale for each row": (
        r"\brow_scaled\b",
        {"mxcompile/formats/" + name for name in ("types.py", "encoding.py", "precisions.py")}
        | {POLICY + "schema.py", SCHEMA, POLICY + "importers/recipes.py", "passes/quantize_gemms.py"},
    ),
}
"""Pattern of a format's names, and the files that docs/extend.md lists for such a format."""


def files_with(*words: str, folders: tuple[str, ...] = ("",)) -> set[str]:
    """The product files in `folders`, all by default, whose text has one of `words`."""
    return {
        name
        for name, text in PRODUCT.items()
        if name.startswith(folders) and any(word in text for word in words)
    }


def files_of_role(role: Role) -> set[str]:
    quoted = files_with(f'"{role}"', f"role-{role} ", folders=("passes/", POLICY, "mxcompile/report/"))
    return quoted | files_with(f"Role.{role.name}")


@pytest.mark.parametrize("role", [role for role in Role if role is not Role.OTHER and not role.row.formula])
def test_role_is_named_beside_its_statement_by_two_files(role: Role):
    statement = files_of_role(role) - ROLE_READERS.get(role, set()) - {POLICY + "roles.py", SCHEMA}
    assert len(statement) == 1
    assert statement.pop().startswith("passes/roles/")


def test_few_files_list_roles():
    roles_in = Counter(name for role in Role for name in files_of_role(role))
    assert {name for name, count in roles_in.items() if count > 4} == {POLICY + "roles.py", SCHEMA}


def test_every_colour_is_a_variable_of_the_page():
    page = PRODUCT["mxcompile/report/forms/page/page.html"]
    assert all(page.count(f"--{role.row.colour}: #") == 2 for role in Role)  # of light and of dark


@pytest.mark.parametrize("key", sorted(schema.USE.keys() - {"precision", *Gemm}))
def test_key_is_named_by_three_files(key: str):
    uses = re.compile(rf'"{key}"|^    {key}: |\b(use|choices|under)\.{key}\b', re.MULTILINE)
    folders = (POLICY, "mxcompile/formats/precisions.py", "mxcompile/analysis/tune/")
    files = {name for name in files_with(key, folders=folders) if uses.search(PRODUCT[name])}
    field = POLICY + "model.py" if key in ("saved", "sent", "backward") else "mxcompile/formats/precisions.py"
    files = {name for name in files if not name.startswith((POLICY + "presets", POLICY + "importers"))}
    assert files - KEY_READERS.get(key, set()) == {POLICY + "schema.py", SCHEMA, field}


@pytest.mark.parametrize("row", ATTENTION_FORWARD.values(), ids=lambda row: row.name)
def test_attention_operator_is_named_by_its_row(row):
    files = files_with(row.name, f"{row.name.removesuffix('_forward')}_backward")
    of_users = {"mxcompile/compiler/session/decompositions.py"}  # calls the function of the same name
    assert files - of_users == {"mxcompile/graph/attention.py"}


@pytest.mark.parametrize("name", FORMAT_READERS)
def test_format_is_named_by_the_files_that_the_lists_have(name: str):
    pattern, files = FORMAT_READERS[name]
    code = {path: re.sub(r'""".*?"""', "", text, flags=re.DOTALL) for path, text in PRODUCT.items()}
    assert {path for path, text in code.items() if re.search(pattern, text)} == files
