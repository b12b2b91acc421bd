"""Parses the module that Inductor generated: its kernels, and the launches of its ``call`` in order.

The module is never executed. The bytes of a launch are the sizes of all tensors that it reads and writes, a
lower bound if it touches all of each.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

_HANDLE = re.compile(r"# \[Provenance debug handles\] (\S+)")
_MUTATED = re.compile(r"'mutated_arg_names': (\[[^\]]*\])")
_RUNS = re.compile(r"call$|partition_|subgraph_")  # functions that run the model; others benchmark it
_ALLOCATORS = re.compile(r"empty_strided_\w+$")
_AS_DTYPE = "torch.ops.aten.view.dtype"  # a view of the same memory


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCall:
    """One launch in a generated module.

    kernel: name of a generated kernel or of an operator, e.g. ``extern_kernels.mm``. generated: False for
    an operator. handle: Inductor's provenance key of the launch. reads, writes: tensors, by the name of their
    allocation. numbers: literal arguments, sizes and the grid. num_bytes: lower bound of the bytes moved.
    """

    kernel: str
    generated: bool
    handle: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    numbers: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """A generated module: Triton source of its kernels by name, and launches in order."""

    kernels: dict[str, str]
    calls: tuple[KernelCall, ...]


def read(source: str, input_bytes: dict[str, int]) -> Module:
    """Returns the kernels and launches in `source`. input_bytes: bytes of its inputs by name."""
    tree = ast.parse(source)
    kernels = dict(_kernels(tree))
    reader = _ModuleReader(source, kernels, input_bytes)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and _RUNS.match(function.name):
            reader.read(function)
    return Module(kernels=kernels, calls=tuple(reader.calls))


def _kernels(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for statement in tree.body:
        match statement:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(
                    func=ast.Attribute(attr="triton"), args=[_, ast.Constant(value=str(code)), *_]
                ),
            ):
                yield name, code


class _ModuleReader:
    """State of parsing one module: the known tensors by name, and the launches."""

    def __init__(self, source: str, kernels: dict[str, str], input_bytes: dict[str, int]) -> None:
        self._lines = source.splitlines()
        self._kernels = kernels
        self._bytes = dict(input_bytes)
        self._itemsize: dict[str, int] = {}
        self._root = {name: name for name in input_bytes}
        self._new: set[str] = set()  # uninitialized memory: its first launch writes it
        self.calls: list[KernelCall] = []

    def read(self, function: ast.FunctionDef) -> None:
        for statement in _statements(function.body):
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._assign(name, value)
                    if self._lines[statement.lineno - 1].endswith("# reuse"):
                        self._new.add(name)
                case ast.Expr(
                    value=ast.Call(func=ast.Name(id="assert_size_stride"), args=[ast.Name(id=name), size, *_])
                ):
                    if name in self._root and not self._bytes.get(name):
                        self._bytes[name] = 2 * _elements(size)  # a library's result, assumed to be 16 bits
                case ast.Expr(value=ast.Call() as call):
                    self._launch(call, result=None)

    def _assign(self, name: str, value: ast.expr) -> None:
        match value:
            case ast.Name(id=other) | ast.Subscript(value=ast.Name(id=other)):
                self._alias(name, other)
            case ast.Call(func=function, args=[ast.Name(id=other), _]) if ast.unparse(function) == _AS_DTYPE:
                self._alias(name, other)
            case ast.Call(func=ast.Name(id=allocator), args=[size, _, dtype]) if _ALLOCATORS.match(allocator):
                torch_dtype = getattr(torch, ast.unparse(dtype).removeprefix("torch."))
                self._itemsize[name] = itemsize = torch_dtype.itemsize
                self._bytes[name] = _elements(size) * itemsize
                self._root[name] = name
                self._new.add(name)
            case ast.Call(func=ast.Name(id="reinterpret_tensor"), args=[ast.Name(id=other), size, *_]):
                self._alias(name, other)
                if name in self._itemsize:
                    self._bytes[name] = _elements(size) * self._itemsize[name]
            case ast.Call() as call:
                self._launch(call, result=name)

    def _alias(self, name: str, other: str) -> None:
        tables: tuple[dict[str, Any], ...] = (self._bytes, self._itemsize, self._root)
        for table in tables:
            if other in table:
                table[name] = table[other]

    def _launch(self, call: ast.Call, result: str | None) -> None:
        target = ast.unparse(call.func)
        kernel, _, method = target.rpartition(".")
        if method == "run" and kernel in self._kernels:
            arguments = [next(_names(argument), "") for argument in call.args]
            parameters = _parameters(kernel, self._kernels[kernel])
            changed = _mutated(self._kernels[kernel])
            pairs = list(zip(parameters, arguments, strict=False))
            new = [
                name
                for parameter, name in pairs
                if parameter.startswith("out_ptr") or (name in self._new and "out_ptr" not in parameter)
            ]
            self._root |= {name: name for name in new}
            written = [
                name
                for parameter, name in pairs
                if "out_ptr" in parameter or parameter in changed or name in new
            ]
            self._add(kernel, call, [name for name in arguments if name not in new], written, True)
        elif target.startswith(("extern_kernels.", "torch.ops.")):
            arguments = [name for argument in call.args for name in _names(argument)]
            names = [name for word in call.keywords if word.arg != "out" for name in _names(word.value)]
            written = [name for word in call.keywords if word.arg == "out" for name in _names(word.value)]
            if result is not None:
                self._root[result] = result
                self._bytes[result] = 0
                written.append(result)
            texts = map(ast.unparse, call.args)  # a random operator with a saved state is an argument
            target = next((text for text in texts if text.startswith("torch.ops.")), target)
            self._add(target, call, arguments + names, written, False)

    def _add(self, kernel: str, call: ast.Call, reads: list[str], writes: list[str], generated: bool) -> None:
        sizes = self._bytes
        moved = [*dict.fromkeys(reads), *dict.fromkeys(writes)]
        self._new.difference_update(moved)
        self.calls.append(
            KernelCall(
                kernel=kernel,
                generated=generated,
                handle=self._handle(call.lineno),
                reads=tuple(dict.fromkeys(self._root[name] for name in reads if name in sizes)),
                writes=tuple(dict.fromkeys(self._root[name] for name in writes if name in sizes)),
                numbers=tuple(
                    argument.value
                    for argument in call.args
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, int)
                ),
                num_bytes=sum(sizes.get(name, 0) for name in moved),
            )
        )

    def _handle(self, line: int) -> str:
        """Returns the handle in the comments directly above a launch."""
        matches = map(_HANDLE.search, reversed(self._lines[max(0, line - 8) : line - 1]))
        return next((match[1] for match in matches if match), "")


def _parameters(kernel: str, source: str) -> list[str]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == kernel:
            return [argument.arg for argument in node.args.args]
    return []


def _mutated(source: str) -> frozenset[str]:
    match = _MUTATED.search(source)
    return frozenset(ast.literal_eval(match.group(1))) if match else frozenset()


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.With):
            yield from _statements(statement.body)
        else:
            yield statement


def _names(expression: ast.expr) -> Iterator[str]:
    for node in ast.walk(expression):
        if isinstance(node, ast.Name):
            yield node.id


def _elements(size: ast.expr) -> int:
    """Returns the number of elements of a literal shape tuple; 0 if it contains symbols."""
    try:
        return math.prod(ast.literal_eval(size))
    except ValueError:
        return 0
