"""Reads policy YAML as plain data with the line of every value. Nothing in the file is executed.

The node graph of the safe loader is converted directly, so a tag never constructs an object.
"""

from __future__ import annotations

import copy
from typing import Any

import yaml

from mxcompile.errors import shown

MAX_BYTES = 1 << 18
MAX_VALUES = 20_000
MAX_DEPTH = 20

_TOO_DEEP = f"nested more than {MAX_DEPTH} deep"

Path = tuple[str | int, ...]

_PREFIX = "tag:yaml.org,2002:"
_SCALARS = {f"{_PREFIX}{kind}" for kind in ("str", "int", "bool", "float", "null")}
_TAGS: dict[type[yaml.Node], set[str]] = {
    yaml.MappingNode: {f"{_PREFIX}map"},
    yaml.SequenceNode: {f"{_PREFIX}seq"},
    yaml.ScalarNode: _SCALARS,
}


class YamlProblem(ValueError):  # noqa: N818 - turned into a PolicyError by the caller
    """A fault in a file at the 1-based `line`; 0 stands for the whole file."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


class _Loader(yaml.SafeLoader):
    """Resolves only the scalar types of a policy, so that dates and ``<<`` stay strings."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> Any:
        """Composes the next node. Gives an alias its own line; PyYAML gives it the line of its anchor."""
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        if isinstance(event, yaml.AliasEvent) and node is not None:
            node = copy.copy(node)
            node.start_mark = event.start_mark
        return node


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag in _SCALARS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


_HINTS = {
    "alias": "quote a glob that starts with '*'",
    r"'\t'": "indent with spaces, not tabs",
    "another document": "a policy is one document: remove '---' and the lines after it",
    "mapping values are not allowed": "check the indentation, and quote a value that contains ': '",
    "block mapping": "check the indentation",
    "flow": "close every '[' and '{'",
    "quoted scalar": "close the quote",
}
"""Advice on a YAML error, by a part of PyYAML's message."""


def load(raw: bytes) -> tuple[Any, dict[Path, int]]:
    """Returns the document in `raw` as dicts, lists and scalars, and the line of every path in it.

    Raises `YamlProblem`.
    """
    if len(raw) > MAX_BYTES:
        raise YamlProblem(f"a policy has at most {MAX_BYTES:,} bytes, this file has more: pass a policy file")
    reader = _NodeReader()
    try:
        text = raw.decode("utf-8")
        node = yaml.compose(text, Loader=_Loader)
        return (None if node is None else reader.value(node, ())), reader.lines
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise YamlProblem(f"not UTF-8 text ({error.reason}): save the file as UTF-8", line) from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        problem = ", ".join(filter(None, (error.context, error.problem)))
        hint = next((f"; {hint}" for sign, hint in _HINTS.items() if sign in problem), "")
        raise YamlProblem(f"not valid YAML: {problem}{hint}", line) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = f"the character U+{error.character:04X} is not allowed: remove it"
        raise YamlProblem(f"not valid YAML: {problem}", line) from None
    except RecursionError:
        raise YamlProblem(_TOO_DEEP) from None


class _NodeReader:
    """Converts a node graph to data and records the line of every path."""

    def __init__(self) -> None:
        self.lines: dict[Path, int] = {}
        self._num_values = 0
        self._open: set[int] = set()

    def value(self, node: yaml.Node, path: Path) -> Any:
        """Returns the data of `node` at `path`."""
        line = node.start_mark.line + 1
        tag = node.tag.replace(_PREFIX, "!!")
        self.lines.setdefault(path, line)
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            few = "match more layers with fewer, wider patterns"
            raise YamlProblem(f"more than {MAX_VALUES:,} values: {few}", line)
        if len(path) > MAX_DEPTH:
            raise YamlProblem(f"{_TOO_DEEP}: a policy needs no more than five levels", line)
        if node.tag not in _TAGS[type(node)]:
            raise YamlProblem(f"the tag {tag} is not allowed: a policy is plain data, remove the tag", line)
        if isinstance(node, yaml.ScalarNode):
            try:
                return yaml.constructor.SafeConstructor().construct_object(node)
            except (ValueError, LookupError, yaml.YAMLError):
                raise YamlProblem(f"cannot read {shown(node.value)} as {tag}", line) from None
        if id(node.value) in self._open:
            raise YamlProblem("an alias refers to a value that contains it: write the value out", line)
        self._open.add(id(node.value))
        data: Any
        if isinstance(node, yaml.MappingNode):
            data = self._mapping(node, path)
        else:
            data = [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        self._open.remove(id(node.value))
        return data

    def _mapping(self, node: yaml.Node, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            is_scalar = isinstance(key_node, yaml.ScalarNode)
            key = self.value(key_node, (*path, key_node.value)) if is_scalar else None
            if not isinstance(key, str):
                kind = "a mapping" if isinstance(key_node, yaml.MappingNode) else "a list"
                text = shown(key_node.value) if is_scalar else kind
                raise YamlProblem(f"a key must be a word, found {text}", line)
            if key in result:
                first = self.lines[(*path, key)]
                raise YamlProblem(f"duplicate key {shown(key)}, first in line {first}: remove one", line)
            result[key] = self.value(value_node, (*path, key))
        return result
