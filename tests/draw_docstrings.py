"""Print docstrings drawn at random, for a reader who has not seen the code.

Usage: python tests/draw_docstrings.py [SEED] [NUMBER]
"""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Iterator

from lint_words import sources


def docstrings(path: str, tree: ast.Module) -> Iterator[str]:
    """Yields each docstring of `tree`, behind its place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = (ast.get_docstring(node) or "").replace("\n", "\n    ")
            if text:
                yield f"{path}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', '')}\n    {text}"


def main(seed: str = "0", number: str = "50") -> None:
    """Print `number` docstrings of the product."""
    every = [text for path, tree in sources() for text in docstrings(path, tree)]
    print(*random.Random(seed).sample(every, int(number)), sep="\n\n")  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
