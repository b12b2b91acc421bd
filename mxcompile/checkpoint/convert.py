"""`convert`: a checkpoint with its policy-chosen weights in MXFP8, MXFP4 or NVFP4, made shard by shard.

    header ─▶ plan;  for each file: read a tensor, cast it, write the file, read it back, measure;  publish

The input is only read. The result grows in a hidden directory beside its place and is renamed into it when
all of it is there. A journal says which files are done: after a kill the same command goes on from there, and
one with another input, policy or layout starts anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import mxcompile
from mxcompile.checkpoint.files import INDEX, PICKLES, Checkpoint, Entry
from mxcompile.checkpoint.layouts import COMPRESSED_TENSORS, stored
from mxcompile.checkpoint.plan import Conversion, make_plan, row
from mxcompile.checkpoint.publish import sync_directory, write_json, write_tensors, writing
from mxcompile.checkpoint.save import described, left_as_they_are, packed, write_index
from mxcompile.errors import CheckpointError
from mxcompile.models.named import LoadedModel
from mxcompile.policy import Policy
from mxcompile.serving.choose import StorageChoice
from mxcompile.serving.table import StoredWeight, StoredWeights
from mxcompile.serving.weights import cast, empty, pieces
from mxcompile.storage import MXTensor

REPORT = "mxfp8_weights.json"
_SKIPPED = PICKLES | {".safetensors", ".part"}


def convert(
    source: str | Path,
    target: str | Path,
    *,
    policy: Policy | str | dict[str, Any] | None = None,
    layout: str = COMPRESSED_TENSORS,
    model: LoadedModel | None = None,
    progress: bool = True,
) -> StoredWeights:
    """Write the checkpoint `source` to the directory `target`, its policy-chosen weights stored quantized.

    source: a directory of safetensors with a Hugging Face config.json, or any safetensors of `model`. policy:
    default the preset ``inference``. layout: as for `save_quantized`. progress: show a bar on a terminal. Of
    every weight that is stored the SQNR is measured on what was read back; the table is in the result too, as
    ``mxfp8_weights.json``.

    Raises `CheckpointError` for an input that is damaged or quantized already, if `target` exists, and where
    it cannot be written; what was converted until then is kept for the same call.
    """
    source, target = Path(source), Path(target).absolute()  # "." has no name
    plan = make_plan(source, policy, layout, model)
    if not target.name:
        raise CheckpointError(f"{target}: exists already")
    work = _Work(plan, target, _fingerprint(plan))
    if target.exists() and not work.is_done():
        raise CheckpointError(f"{target}: exists already")
    if source.is_dir() and source.resolve() in (target.resolve(), *target.resolve().parents):
        raise CheckpointError(f"{target}: lies in the input, which is not touched")
    with writing(target), work.alone():
        if not target.exists():
            steps = 2 * len(plan.checkpoint.entries)  # every tensor is written, then looked at
            hidden = None if progress else True
            with tqdm(desc="convert", total=steps, unit="tensor", disable=hidden, leave=False) as bar:
                work.on_tensor = bar.update
                for file in plan.checkpoint.files:
                    bar.set_description(f"convert {file.name}")
                    work.do(file)
            work.finish()
        return work.clean()


def _fingerprint(plan: Conversion) -> str:
    """Everything the result depends on."""
    files = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in plan.checkpoint.files]
    chosen = [(name, repr(each)) for name, each in plan.chosen.items()]
    what = repr((mxcompile.__version__, str(plan.checkpoint.path.resolve()), files, chosen, plan.layout.name))
    return hashlib.sha256(what.encode()).hexdigest()


class _Work:
    """A conversion under way: what is done of it, on disk.

    on_tensor: called twice for each tensor, when it is written and when it was looked at.
    """

    def __init__(self, plan: Conversion, target: Path, job: str) -> None:
        self._plan = plan
        self._target = target
        self._job = job
        self._partial = target.with_name(f".{target.name}.partial")
        self._journal = target.with_name(f".{target.name}.journal.json")
        self._done: dict[str, list[dict[str, Any]]] = self._recall()
        self.on_tensor: Callable[[], object] = lambda: None

    def _recall(self) -> dict[str, list[dict[str, Any]]]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            journal = json.loads(self._journal.read_text(encoding="utf-8"))
            if journal["job"] == self._job:
                return dict(journal["done"])
        return {}

    def is_done(self) -> bool:
        """Whether the result is this job's, and only the journal was left."""
        return {file.name for file in self._plan.checkpoint.files} == {*self._done}

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the place against other conversions; begin anew if what is there is of another job."""
        lock = self._target.with_name(f".{self._target.name}.lock")
        with lock.open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = os.path.samestat(os.fstat(handle.fileno()), lock.stat())
            except OSError:
                held = False
            if not held:  # by now it may be that of one who has finished, and taken it away
                raise CheckpointError(f"{self._target}: another conversion is writing it")
            if not self._done and not self._target.exists():
                shutil.rmtree(self._partial, ignore_errors=True)
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)

    def do(self, file: Path) -> None:
        """Convert one file, unless that is done."""
        partial = self._partial / file.name
        if file.name in self._done and partial.is_file():
            return
        self._partial.mkdir(exist_ok=True)
        rows = _convert_file(self._plan, file, partial, self.on_tensor)
        self._done[file.name] = [dataclasses.asdict(each) for each in rows]
        write_json(self._journal, {"job": self._job, "done": self._done})

    def table(self) -> StoredWeights:
        """The outcome for each weight."""
        rows = [each for rows in self._done.values() for each in rows]
        return StoredWeights(
            weights=tuple(StoredWeight(**{**each, "shape": tuple(each["shape"])}) for each in rows)
        )

    def finish(self) -> None:
        """Write what goes with the weights, and publish; a killed writer's temporary files are removed."""
        for file in self._partial.iterdir():
            if file.name not in self._done:
                file.unlink()
        checkpoint = Checkpoint.open(self._partial)
        _write_index(self._partial, checkpoint)
        source = self._plan.checkpoint.path
        folder = source if source.is_dir() else source.parent
        if source.is_dir():
            for file in sorted(folder.iterdir()):
                skipped = file.suffix in _SKIPPED or file.name in ("config.json", INDEX)
                if file.is_file() and not file.name.startswith(".") and not skipped:
                    shutil.copyfile(file, self._partial / file.name)
        if self._plan.config:
            config = dict(self._plan.config)
            if self._plan.layout.config is not None:
                ignored, stored_in = _ignored(self._plan), self._plan.stored_modules
                config["quantization_config"] = self._plan.layout.config(ignored, stored_in)
            write_json(self._partial / "config.json", config)
        write_json(self._partial / REPORT, [dataclasses.asdict(each) for each in self.table().weights])
        sync_directory(self._partial)
        self._partial.rename(self._target)
        sync_directory(self._target.parent)

    def clean(self) -> StoredWeights:
        """Remove the journal; what became of the weights."""
        self._journal.unlink(missing_ok=True)
        return self.table()


def _ignored(plan: Conversion) -> list[str]:
    """Modules of two-dimensional weights that are not stored, as files and as the model call them."""
    kept = {
        name: torch.empty(entry.shape, device="meta")
        for name, entry in plan.checkpoint.entries.items()
        if name not in plan.chosen or plan.chosen[name].form is None
    }
    return [*left_as_they_are(kept), *plan.whole]


def _write_index(directory: Path, checkpoint: Checkpoint) -> None:
    if len(checkpoint.files) < 2:
        return
    total = sum(entry.num_bytes for entry in checkpoint.entries.values())
    write_index(directory, {name: entry.file.name for name, entry in checkpoint.entries.items()}, total)


def _convert_file(
    plan: Conversion, file: Path, output: Path, on_tensor: Callable[[], object]
) -> list[StoredWeight]:
    """Write `file`, converted, to `output`; what became of its weights, measured on what `output` holds."""
    entries = plan.checkpoint.entries.items()
    empty = {name: _empty(each, plan.chosen.get(name)) for name, each in entries if each.file == file}
    specs, about = described(empty, plan.layout)
    write_tensors(output, specs, _converted(plan, empty, on_tensor), about)
    return list(_measured(plan, file, output, on_tensor))


def _empty(entry: Entry, chosen: StorageChoice | None) -> Tensor:
    """Returns the result of a tensor's conversion, without its values."""
    if chosen is None or chosen.form is None:
        return torch.empty(entry.shape, dtype=entry.dtype, device="meta")
    return empty(entry.shape, -1, chosen.form, entry.dtype, "meta")


def _converted(
    plan: Conversion, names: Iterable[str], on_tensor: Callable[[], object]
) -> Iterator[tuple[str, Tensor]]:
    """The parts of the tensors called `names`, one read and cast at a time."""
    for name in names:
        value = plan.checkpoint.read(name)
        chosen = plan.chosen.get(name)
        if chosen is not None and chosen.form is not None:
            value = cast(value, chosen.block_dim, chosen.form)
        yield from packed(name, value, plan.layout).items()
        on_tensor()


def _measured(
    plan: Conversion, file: Path, output: Path, on_tensor: Callable[[], object]
) -> Iterator[StoredWeight]:
    readers = stored(Checkpoint.open(output), torch.float32)
    for name, entry in plan.checkpoint.entries.items():
        if entry.file != file:
            continue
        on_tensor()
        if name in plan.chosen:
            told = row(entry, plan.chosen[name])
            if told.stored:
                value = readers[name]()
                assert isinstance(value, MXTensor)
                told = dataclasses.replace(told, sqnr_db=sqnr_db(plan.checkpoint.read(name), value))
            yield told


def sqnr_db(x: Tensor, stored: MXTensor) -> float | None:
    """Signal over error of `stored`, which stands for `x`, in dB; None if it is exact."""
    signal = error = 0.0
    for rows in pieces(x, stored.block_dim % x.ndim):
        source = x[rows].double()
        part: Any = stored[rows]
        signal += source.square().sum().item()
        error += (source - part.dequantize(torch.float32)).square().sum().item()
    return 10 * math.log10(signal / error) if error > 0 and signal > 0 else None
