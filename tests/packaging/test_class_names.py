"""A class name is used once in the product, so that a reader who searches for it finds one class."""

from __future__ import annotations

import ast
from collections import Counter

from test_import_order import modules

SHARED = {"Rule", "Site", "Watch", "Watching"}
"""Rules of policies and watches; sites of roles and of samples; the pass of a `Watch`; its callbacks."""


def test_a_class_name_is_used_once():
    names = Counter(
        node.name
        for path in modules().values()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, times in names.items() if times > 1} == SHARED
