"""The inputs of a captured graph, found in the user's model by what they are.

A parameter is found by identity where it is the model's own; else by the module it is read from (weights
that a wrapper puts there for the time of a call are tensors of its own), or by its path where that is the
key of a dictionary (``torch.func.functional_call``).
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, fx, nn

from mxcompile.compiler.frames import Frame
from mxcompile.models.names import GraphInput, joined, user_path

_LAST_KEY = re.compile(r"\[('[^']*'|\"[^\"]*\")\]$")


_BELOW_A_LOCAL = len("L[")
"""From where on in a source a key is one of a dictionary, no name of a local or global variable."""
_ON_STACK = "L['___stack"


class Paths:
    """Parameters, buffers and modules of `root` by identity, under the user's paths."""

    def __init__(self, root: nn.Module | None) -> None:
        self.tensors: defaultdict[int, list[str]] = defaultdict(list)
        self.modules: dict[int, str] = {}
        self.paths: set[str] = set()
        if root is None:
            return
        for owned in (root.named_parameters, root.named_buffers):
            for raw, value in owned(remove_duplicate=False):
                self.tensors[id(value)].append(user_path(raw))
        for raw, module in root.named_modules():
            self.modules.setdefault(id(module), user_path(raw))
        self.paths = {path for paths in self.tensors.values() for path in paths}


class Located:
    """The inputs of a graph of `root`, called with `values`.

    inputs: what each is, by its path below `path`. matrices: paths in the model of the parameters and buffers
    of more than one dimension. prefix: of the frame's module in the model, by its parameters among the
    inputs. module: of the frame's ``self``. path: of that which Dynamo's names of modules are relative to.
    owner: the source, in Dynamo's terms, of the module at `prefix`; None if it is the model or not known.
    """

    def __init__(
        self, gm: fx.GraphModule, values: Sequence[Any], root: nn.Module | None, frame: Frame
    ) -> None:
        self._model = Paths(root)
        self._frame = frame
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        sources = [source_of_input(node) for node in placeholders]
        paths = [self._path(source, value) for source, value in zip(sources, values, strict=False)]
        prefixes: Counter[str] = Counter()
        named: Counter[str] = Counter()  # without those that Dynamo kept on the stack over a graph break
        for source, path in zip(sources, paths, strict=False):
            relative = user_path(name_of(source))
            if path and relative and f".{path}".endswith(f".{relative}"):
                prefix = path.removesuffix(relative).removesuffix(".")
                prefixes[prefix] += 1
                named[prefix] += not name_of(source).startswith(_ON_STACK)
        own = self._model.modules.get(id(frame.locals.get("self")))
        self.prefix, self.module = _most(prefixes), own or ""
        self.path = _most(+named) or self.module if +named or own is not None else self.prefix
        self.inputs = tuple(map(self._input, paths, values))
        self.matrices = tuple(
            path
            for path, value in zip(paths, values, strict=False)
            if path and isinstance(value, Tensor) and value.ndim > 1
        )
        owners = (self._owner(source, outermost=True) for source in sources)
        self.owner = next((s for s, path in owners if path == self.prefix != ""), None)

    def _input(self, path: str | None, value: Any) -> GraphInput:
        """The input of the graph that is `value`, at `path` in the model; None for data."""
        shared = [p for p in self._model.tensors.get(id(value), ()) if p != path] if path else ()
        return GraphInput(
            path=self._below(path) if path else "",
            others=tuple(self._below(p) for p in shared if p.startswith(f"{self.path}.") or not self.path),
            static=path is not None,
        )

    def _below(self, path: str) -> str:
        return path.removeprefix(f"{self.path}.") if self.path else path

    def _path(self, source: Any, value: Any) -> str | None:
        """The path in the model of a parameter or buffer, "" if unknown; None for anything else."""
        raw = name_of(source)
        owner = self._owner(source)[1]
        named = joined(owner, raw_attribute(raw)) if owner is not None else user_path(raw)
        known = self._model.tensors.get(id(value)) or self._model.tensors.get(id(self._frame.evaluate(raw)))
        if known:
            return named if named in known else known[0]
        if isinstance(value, nn.Parameter) or "_parameters[" in raw or "_buffers[" in raw:
            return named
        if not isinstance(value, Tensor):
            return None
        if owner is not None and named in self._model.paths:
            return named
        key = _LAST_KEY.search(raw, _BELOW_A_LOCAL)
        path = user_path(str(ast.literal_eval(key[1]))) if key else ""
        return path if path in self._model.paths else None

    def _owner(self, source: Any, outermost: bool = False) -> tuple[Any, str | None]:
        """The innermost module of the model that `source` goes through, or the outermost, and its path."""
        match: tuple[Any, str | None] = None, None
        for base in _bases(source):
            path = self._model.modules.get(id(self._frame.evaluate(name_of(base))))
            if path is not None:
                match = base, path
                if not outermost:
                    break
        return match


def _most(counted: Counter[str]) -> str:
    """Returns the key with the largest count, "" if there is none."""
    return counted.most_common(1)[0][0] if counted else ""


def source_of_input(node: fx.Node) -> Any:
    """Where Dynamo has the input from; None for one that something else put there."""
    return getattr(node, "_dynamo_source", None) or getattr(node.meta.get("grapharg"), "source", None)


def name_of(source: Any) -> str:
    """The name of a source, a Python expression; "" for None."""
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)


def raw_attribute(raw: str) -> str:
    """The last step of a source's name."""
    return user_path(raw).rpartition(".")[2]


def _bases(source: Any) -> Iterator[Any]:
    while source is not None and (source := getattr(source, "base", None)) is not None:
        yield source
