"""The rules of words in docs/CONTRIBUTING.md that a program can check: `python tests/lint_words.py`.

Reads README.md, the pages of docs/ and examples/, and docstrings, comments, messages and variables of the
product. Reads the variables of benchmarks/, examples/ and tests/ and the names of tests too. Prints a line
for each fault and exits with status 1 if there is one. Code, quotes, headings and generated tables are left
out.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 25  # words a sentence
SHORTEST_TEST = 4  # words behind "test_"

QUOTED = re.compile(r"[\"“][^\"“”]{1,80}[\"”]")
GENERATED = re.compile(r"<!-- (\w+): begin -->.*?<!-- \1: end -->", re.DOTALL)
SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[A-Z0-9\"'(*]|mxcompile)")
IS_NO = re.compile(
    r"(?<![Tt]here )\b(?:is|are|was|were) no\b(?! (?:longer|more|less|larger|smaller|faster|slower|wider)\b)"
)
THAT_OF = re.compile(r"\b(?:that|those) of\b")
SOURCES = ("mxcompile", "lowering", "passes")
"""Folders whose docstrings and variables follow the rules."""
NO_SUBJECTS = ("What", "Of", "That", "Those")
NO_NOUNS = {
    *("settle", "meet", "hear", "learn", "recall", "adopt", "told", "found", "made", "given", "known"),
    *("each", "one", "place", "own", "held", "left", "again", "said", "met", "heard", "asked", "born"),
    *("tell", "what"),
}
"""Words that do not name a value: a noun of the field does."""
KEPT_NOUNS = {
    "mxcompile/analysis/audit/diff.py": {"what"},  # public field of `compare_audits`'s result
    "mxcompile/analysis/blame/blamed.py": {"asked", "left"},  # public fields of `blame`'s result
    "mxcompile/analysis/tune/tuned.py": {"met"},  # public field of `tune`'s result
    "mxcompile/mesh/collectives.py": {"what"},  # public field of `explain_rank`'s result
    "mxcompile/report/diff.py": {"what"},  # public field of `compare`'s result
    "mxcompile/report/forms/layout.py": {"left"},  # left edge of a picture
    "mxcompile/report/forms/picture.py": {"left"},
}
"""Words of `NO_NOUNS` that a file may use, with the reason; "left" also stands beside "right"."""
NO_VERBS = re.compile(r"_*(settle|meet|hear|learn|recall|adopt|tell|ask|know)(_|$)")
"""Verbs of functions that let code speak or know, where a common verb says what they do."""

_VERB = re.compile(r"[A-Z][a-z-]*s,?$|Whether$|`")
_CODE = re.compile(r"``.+?``|`.+?`", re.DOTALL)
_TABLE = re.compile(r"(?:\A|\n\n) {4}.*?(?=\n\n|\Z)", re.DOTALL)

STRICT_RULES = {
    'name the noun instead of "what"': re.compile(r"\bwhat (?:is|are|was|it|the|a|has|have|does)\b", re.I),
    'repeat the noun instead of "of which"': re.compile(r"\bof (?:which|whom)\b"),
    'repeat the noun after ";"': re.compile(r"; (?:of|for) (?:the|an?|each|all|one)\b|; of "),
    'begin a field with a noun, not with "of"': re.compile(r"\b\w+: (?:of|that)\b"),
    "use the noun": THAT_OF,
    'use the noun instead of "one"': re.compile(
        r"\bones\b|\b(?:the|this|last|next|first|other|another|any) one\b"
        r"|(?:\A|[.;:,] )[Oo]ne (?:is|has|was|can|that|which|whose|with|without)\b"
    ),
    "name the function or the file that does it: things do not speak": re.compile(
        r"\b(?:says?|said|tells?|told|asks?|asked|hears?|heard|speaks?|knows?|knew|learns?|learned|recalls?)\b"
    ),
    "use a common verb": re.compile(r"\b(?:settles?|settled|meets?|met|adopts?|adopted)\b"),
    "write Examples:, which mkdocstrings renders": re.compile(r"(?:\A|\n)Example:\s"),
}

MESSAGE_RULES = STRICT_RULES | {
    'name the noun instead of "what"': re.compile(r"\bwhat\b", re.I),
    'say "is not a"': IS_NO,
    'say "must be", as in "`node` must be a whole number, found 0.5"': re.compile(
        r"\b(?:is|are) (?:an?|True)\b[^:;]*, found"
    ),
    "say what the user has: a value that is not known has no name": re.compile(
        r"\bnot known\b|\bat hand\b|\bin sight\b|\bto be had\b"
    ),
}
_MESSAGE = re.compile(r"[A-Za-z'-]+,? [A-Za-z'-]+,? [A-Za-z'-]{2,}")
_GENERATED_CODE = re.compile(r"\n    |;$|[{}]{2}|\btl\.|\(\?P")

COINED = ("tapped", "twin", "obstacle", "misfit", "disguise", "outline")


def main() -> int:
    """Returns 1 if a page or a docstring breaks a rule, else 0."""
    faults = [*pages()]
    for path, tree in sources():
        faults += [*docstrings(path, tree), *variables(path, tree), *messages(path, tree)]
        faults += strict(path, (ROOT / path).read_text(encoding="utf-8"))
    for folder in ("benchmarks", "examples", "tests"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            path, tree = str(file.relative_to(ROOT)), ast.parse(file.read_text(encoding="utf-8"))
            faults += [*variables(path, tree), *tests(path, tree)]
    for fault in faults:
        print(fault)  # noqa: T201
    return bool(faults)


def pages() -> Iterator[str]:
    """Yields a line for each fault of README.md and of the pages below docs/ and examples/."""
    defined = headings((ROOT / "docs/glossary.md").read_text(encoding="utf-8"))
    files = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("examples/*.md"))]
    for file in files:
        for line, text in prose(file.read_text(encoding="utf-8")):
            for sentence in SENTENCE_END.split(text):
                for fault in faults_of(sentence, defined):
                    yield f"{file.relative_to(ROOT)}:{line}: {fault}: {sentence}"


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Yields the path and the tree of each Python file of `SOURCES`."""
    for folder in SOURCES:
        for file in sorted((ROOT / folder).rglob("*.py")):
            if not any(parent.is_symlink() for parent in file.parents):
                yield str(file.relative_to(ROOT)), ast.parse(file.read_text(encoding="utf-8"))


def docstrings(path: str, tree: ast.Module) -> Iterator[str]:
    """Yields a line for each docstring that begins with a word of `NO_SUBJECTS`, or says "is no X"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if text.partition(" ")[0] in NO_SUBJECTS:
                yield f"{path}:{getattr(node, 'lineno', 1)}: has no subject: {text.splitlines()[0]}"
            if IS_NO.search(" ".join(text.split())):
                yield f'{path}:{getattr(node, "lineno", 1)}: say "is not a": {text.splitlines()[0]}'


def strict(path: str, source: str) -> Iterator[str]:
    """Yields a line for each docstring and comment that breaks `STRICT_RULES`, or lacks a verb in line 1."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield from _broken(path, node.lineno, inspect.cleandoc(str(node.value.value)))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = (ast.get_docstring(node) or "Is empty").split()[0]
            is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
            if not (is_property or node.name == "__init__" or _VERB.match(first)):
                yield f'{path}:{node.lineno}: begin with a verb, as "Returns", or with "Whether": {first}'
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from _broken(path, token.start[0], token.string.removeprefix("#").strip())


def messages(path: str, tree: ast.Module) -> Iterator[str]:
    """Yields a line for each string of three words or more that breaks `MESSAGE_RULES`.

    Errors, warnings, reasons, help texts and headings of tables are such strings.
    """
    left_out = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = str(node.value) if isinstance(node, ast.Constant) else ""
        if isinstance(node, ast.JoinedStr):
            left_out |= {id(part) for part in node.values}
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        is_message = _MESSAGE.search(text) and not _GENERATED_CODE.search(text)
        if is_message and id(node) not in left_out:
            yield from _broken(path, node.lineno, text, MESSAGE_RULES)


def _broken(
    path: str, line: int, text: str, rules: dict[str, re.Pattern[str]] = STRICT_RULES
) -> Iterator[str]:
    """Yields a line for each of `rules` that `text` breaks; tables, code and quotes are left out."""
    plain = QUOTED.sub("QUOTE", _CODE.sub("CODE", _TABLE.sub("", text)))
    prose = re.sub(r"(?<!\n)\n *(?!\n)", " ", plain)
    for fault, rule in rules.items():
        if match := rule.search(prose):
            yield f"{path}:{line}: {fault}: {match[0]!r} in {text.splitlines()[0]}"


def variables(path: str, tree: ast.Module) -> Iterator[str]:
    """Yields a line for each name of `NO_NOUNS`, and for each function of `NO_VERBS`."""
    bound = [(node.lineno, name) for node in ast.walk(tree) if (name := _bound_name(node))]
    kept = KEPT_NOUNS.get(path, set()) | ({"left"} if "right" in {name for _, name in bound} else set())
    for line, name in bound:
        if name.strip("_") in NO_NOUNS - kept:
            yield f"{path}:{line}: {name} is not a noun of the field"
    for node in ast.walk(tree):
        name = node.name if isinstance(node, ast.FunctionDef) else ""
        if NO_VERBS.match(name) and name.strip("_") not in NO_NOUNS:
            yield f"{path}:{node.lineno}: {name} is not a common verb"


def _bound_name(node: ast.AST) -> str:
    """Returns the name of the parameter, variable, attribute or function that `node` binds, or ""."""
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.attr
    return node.name if isinstance(node, ast.FunctionDef) else ""


def tests(path: str, tree: ast.Module) -> Iterator[str]:
    """Yields a line for each test whose name is too short for a condition and a result, or has "is no"."""
    for node in ast.walk(tree):
        name = node.name if isinstance(node, ast.FunctionDef) else ""
        if name.startswith("test_") and name.count("_") < SHORTEST_TEST:
            yield f"{path}:{node.lineno}: {name} needs a subject, a condition and a result"
        if name.startswith("test_") and IS_NO.search(name.replace("_", " ")):
            yield f'{path}:{node.lineno}: say "is not a": {name}'


def faults_of(sentence: str, defined: set[str]) -> Iterator[str]:
    """Yields the rules that `sentence` breaks; `defined` are the words of the glossary, in lower case."""
    words = [word for word in sentence.split() if any(letter.isalnum() for letter in word)]
    if len(words) > LONGEST:
        yield f"{len(words)} words"
    if IS_NO.search(sentence):
        yield 'say "is not a"'
    if THAT_OF.search(sentence):
        yield "use the noun"
    if sentence.startswith("What ") and not sentence.endswith("?"):
        yield "begins with What"
    for word in COINED:
        if re.search(rf"\b{word}", sentence, re.IGNORECASE) and word not in defined:
            yield f"{word!r} is not in docs/glossary.md"


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of each paragraph, list item and table cell; a piece of code is one word."""
    plain = GENERATED.sub(lambda match: "\n" * match[0].count("\n"), text)
    line = 0
    tokens = MarkdownIt().enable("table").parse(plain)
    for before, token in zip([None, *tokens], tokens, strict=False):
        line = token.map[0] + 1 if token.map else line
        if token.type == "inline" and before is not None and before.type != "heading_open":
            yield line, QUOTED.sub("QUOTE", "".join(map(_words, token.children or ())).strip())


def headings(text: str) -> set[str]:
    """Returns the bold words and headings of a page, in lower case."""
    matches = re.findall(r"\*\*(.+?)\*\*|^#+ (.+)$", text, re.MULTILINE)
    return {word.lower() for match in matches for word in match if word}


def _words(token) -> str:
    if token.type == "code_inline":
        return "CODE"
    return " " if token.type in ("softbreak", "hardbreak") else token.content if token.type == "text" else ""


if __name__ == "__main__":
    sys.exit(main())
