"""Policy YAML to plain data with a line for every value; nothing in the file is executed.

Only the YAML node graph is read (`yaml.compose` with the safe loader): no object is constructed
from a tag; duplicate keys, foreign tags and cycles are errors; size, and with it time, is bounded.
"""

from __future__ import annotations

from typing import Any

import yaml

from mxcompile.errors import shown

MAX_BYTES = 1 << 18
MAX_VALUES = 20_000  # more are refused before they are read: PyYAML makes about 40,000 a second
MAX_DEPTH = 20

Path = tuple[str | int, ...]

_TOO_MANY = f"more than {MAX_VALUES:,} values: match more layers with fewer, wider patterns"
_TOO_DEEP = f"nested more than {MAX_DEPTH} deep: a policy needs no more than five levels"

_SCALARS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "bool", "float", "null")}
_MAP = "tag:yaml.org,2002:map"
_SEQUENCE = "tag:yaml.org,2002:seq"


class YamlProblem(ValueError):  # noqa: N818 - turned into a PolicyError by the caller
    """A fault in a file, with its 1-based `line` (0: the file as a whole)."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


class _Alias:
    """An alias where it stands: PyYAML gives the node of its anchor, with the anchor's line."""

    def __init__(self, target: yaml.Node, start_mark: Any) -> None:
        self.target = target
        self.start_mark = start_mark


_Node = yaml.Node | _Alias


class _Loader(yaml.SafeLoader):
    """Knows the plain scalars only: a date or ``<<`` is a string."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> Any:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        mark: Any = event.start_mark
        self.num_nodes += 1
        if self.num_nodes > MAX_VALUES:
            raise YamlProblem(_TOO_MANY, mark.line + 1)
        node = super().compose_node(parent, index)
        if isinstance(event, yaml.AliasEvent) and node is not None:
            return _Alias(node, mark)
        return node


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag in _SCALARS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


_HINTS = {
    "alias": "quote a glob that starts with '*'",
    r"'\t'": "indent with spaces, not tabs",
    "another document": "a policy is one document: remove what follows '---'",
    "mapping values are not allowed": "check the indentation, and quote a value that holds ': '",
    "block mapping": "check the indentation",
    "flow": "close every '[' and '{'",
    "quoted scalar": "close the quote",
}
"""What to do about a YAML error, by a part of PyYAML's message."""


def load(raw: bytes) -> tuple[Any, dict[Path, int]]:
    """The document in `raw` as dicts, lists and scalars, and the line of every path in it."""
    if len(raw) > MAX_BYTES:
        raise YamlProblem(f"a policy has at most {MAX_BYTES:,} bytes, this file has more: is it one?")
    node = _compose(_decoded(raw))
    reader = _NodeReader()
    return (None if node is None else reader.read(node, ())), reader.lines


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise YamlProblem(f"not UTF-8 text ({error.reason}): save the file as UTF-8", line) from None


def _compose(text: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        problem = ", ".join(filter(None, (error.context, error.problem)))
        hint = next((f"; {hint}" for sign, hint in _HINTS.items() if sign in problem), "")
        raise YamlProblem(f"not valid YAML: {problem}{hint}", line) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        character = f"U+{error.character:04X}"
        problem = f"the character {character} is not allowed: remove it"
        raise YamlProblem(f"not valid YAML: {problem}", line) from None
    except RecursionError:
        raise YamlProblem(_TOO_DEEP) from None


class _NodeReader:
    """Walks the node graph once, with what it is inside of."""

    def __init__(self) -> None:
        self.lines: dict[Path, int] = {}
        self._open: set[int] = set()

    def read(self, node: _Node, path: Path) -> Any:
        line = node.start_mark.line + 1
        self.lines.setdefault(path, line)
        if isinstance(node, _Alias):
            node = node.target
        if len(self.lines) > MAX_VALUES:
            raise YamlProblem(_TOO_MANY, line)
        if id(node) in self._open:
            raise YamlProblem("an alias points at something it is itself part of: write it out", line)
        if len(path) > MAX_DEPTH:
            raise YamlProblem(_TOO_DEEP, line)
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                _check_tag(node, {_SEQUENCE}, line)
                return [self.read(item, (*path, i)) for i, item in enumerate(node.value)]
            return _scalar(node, line)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        _check_tag(node, {_MAP}, node.start_mark.line + 1)
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = _scalar(key_node, line) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                raise YamlProblem(f"a key must be a word, found {_shown_key(key_node)}", line)
            if key in result:
                first = self.lines[(*path, key)]
                raise YamlProblem(
                    f"duplicate key {shown(key)}, first given in line {first}: remove one", line
                )
            self.lines[(*path, key)] = line
            result[key] = self.read(value_node, (*path, key))
        return result


def _check_tag(node: yaml.Node, allowed: set[str], line: int) -> None:
    if node.tag not in allowed:
        raise YamlProblem(
            f"the tag {_shown_tag(node)} is not allowed: a policy is plain data, remove the tag", line
        )


def _shown_tag(node: yaml.Node) -> str:
    return shown(node.tag.replace("tag:yaml.org,2002:", "!!")).strip("'")


def _shown_key(node: _Node) -> str:
    match node:
        case yaml.ScalarNode():
            return shown(node.value)
        case yaml.SequenceNode():
            return "a list"
        case yaml.MappingNode():
            return "a mapping"
        case _:
            return "an alias"


def _scalar(node: yaml.Node, line: int) -> Any:
    _check_tag(node, _SCALARS, line)
    try:
        return yaml.constructor.SafeConstructor().construct_object(node)
    except (ValueError, LookupError, yaml.YAMLError):
        raise YamlProblem(f"cannot read {shown(node.value)} as {_shown_tag(node)}", line) from None
