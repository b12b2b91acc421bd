"""Arguments that several commands share. Cheap checks of them run before any work."""

from __future__ import annotations

import argparse
import logging
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxcompile.errors import OptionError, not_allowed

if TYPE_CHECKING:
    from mxcompile.policy import Policy


def positive(text: str) -> int:
    """Returns `text` as a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def seed(text: str) -> int:
    """Returns `text` as a seed for ``torch.manual_seed``, which takes 64 bits with a sign or without."""
    number = int(text)
    if not -(1 << 63) <= number < 1 << 64:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 64 bits")
    return number


def share(text: str) -> float:
    """Returns a share, ``0.2%`` or ``0.002``, as a number."""
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share, such as 0.002 or 0.2%") from None


def add_model(command: argparse.ArgumentParser, name: str = "model", **settings: Any) -> None:
    """Adds the arguments for a model and its inputs. settings: argparse's options of the argument `name`."""
    command.add_argument(
        name,
        **settings,
        metavar="MODEL",
        help="package.module:factory, which returns (model, args, kwargs), or a directory with a config.json",
    )
    command.add_argument(
        "--batch", type=positive, default=1, help="batch size of a config.json's inputs (default 1)"
    )
    command.add_argument(
        "--length",
        type=positive,
        help="sequence length of a config.json's inputs (default 512, or the model's maximum if smaller)",
    )
    command.add_argument(
        "--dtype",
        choices=("bf16", "fp16", "fp32"),
        help="dtype of the model and its inputs (default: the dtype that MODEL or its config.json has)",
    )


def selected(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Returns the values of the arguments `names`, as keyword arguments of a function."""
    return {name: getattr(options, name) for name in names}


def loaded(options: argparse.Namespace) -> tuple[Any, Sequence[Any], Mapping[str, Any]]:
    """Returns the model of `add_model` with its arguments."""
    from mxcompile.models.named import load_model

    model = load_model(options.model, **selected(options, "batch", "length", "dtype"))
    return model.model, model.args, model.kwargs


def of_ranks(options: argparse.Namespace) -> tuple[Any, Sequence[Any], Mapping[str, Any]]:
    """Returns the model of one rank and its arguments: a plain model with --parallel, else the factory.

    A factory is called later, on the rank. Raises `OptionError` for sizes in addition to a factory.
    """
    from mxcompile.models.named import factory_of

    factory = factory_of(options.model) if options.parallel is None else None
    if factory is None:
        return loaded(options)
    leave_out(options, "a factory sets the sizes and dtype of its model itself", "length", "dtype")
    return factory, (), {}


def leave_out(options: argparse.Namespace, reason: str, *names: str) -> None:
    """Raises `OptionError` with `reason` if one of the flags `names` is set."""
    for name in names:
        if getattr(options, name) is not None:
            raise OptionError(f"{reason}: leave out `{name}`")


def add_parallel(command: argparse.ArgumentParser) -> None:
    """Adds the flag for the parallelisation of a plain model on a mesh."""
    command.add_argument(
        "--parallel",
        metavar="WAYS",
        help="how to parallelise a plain model on the mesh: fsdp, ep, tp=llama; several separated by commas",
    )


def add_policy(command: argparse.ArgumentParser) -> None:
    """Adds the flag for the policy."""
    command.add_argument(
        "--policy", default="nvidia", metavar="PRESET|FILE", help="policy to apply (default nvidia)"
    )


def policies_of(words: str) -> list[Policy]:
    """Returns the policies of `words`, separated by commas. Raises `PolicyError`."""
    from mxcompile.policy import Policy

    return [Policy.resolve(word.strip()) for word in words.split(",")]


def add_output(command: argparse.ArgumentParser, help_text: str) -> None:
    """Adds the flags for the output file."""
    command.add_argument("-o", "--output", type=Path, metavar="FILE", help=help_text)
    command.add_argument("--force", action="store_true", help="overwrite the output file")


def add_folder(command: argparse.ArgumentParser, help_text: str, default: Path | None = None) -> None:
    """Adds the flag for the output folder, whose files are overwritten."""
    command.add_argument("-o", "--output", "--out", type=Path, default=default, metavar="DIR", help=help_text)


def check_output(options: argparse.Namespace, form_of: Callable[[Path], object] | None = None) -> None:
    """Raises `OptionError` if ``--output`` cannot be written, or exists without ``--force``.

    form_of: raises for a file of an unknown form. The folder must exist, so that a typo does not create one.
    """
    path: Path | None = options.output
    if path is None:
        return
    if form_of is not None:
        form_of(path)
    if path.is_dir():
        raise OptionError(f"{path} is a directory: name a file in it")
    if path.exists() and not options.force:
        raise OptionError(f"{path} exists: give --force to overwrite it, or name another file")
    _check_writable(path)


def show(result: Any, options: argparse.Namespace, summary: str = "") -> None:
    """Prints `result`, or saves it to ``--output`` and prints `summary` and the path."""
    if options.output is None:
        print(result)
        return
    result.save(options.output)
    print(f"{summary}written to {options.output}")


def show_policy(result: Any, options: argparse.Namespace, *, success: bool) -> int:
    """Prints `result`. On `success`, writes its policy to ``--output``, or prints it as YAML.

    Returns the exit status: 0 on success, else 1.
    """
    print(result)
    if not success:
        return 1
    if options.output is None:
        print(f"\n{result.to_yaml()}", end="")
    else:
        result.dump(options.output)
        print(f"\nwritten to {options.output}")
    return 0


def check_folder(path: Path | None) -> None:
    """Raises `OptionError` if `path` is not a writable folder and cannot be created in an existing one."""
    if path is None:
        return
    if path.exists() and not path.is_dir():
        raise OptionError(f"{path} is a file: name a folder")
    _check_writable(path)


def _check_writable(path: Path) -> None:
    """Raises `OptionError` if no file can be created in the folder `path`, or else next to `path`."""
    folder = path if path.is_dir() else path.absolute().parent
    if not folder.is_dir():
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        reason = f"there is no folder {folder}" if there.is_dir() else f"{there} is a file"
        raise OptionError(f"{path} cannot be written: {reason}")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OptionError(f"{path} cannot be written: {folder}: {error.strerror}") from None


def check_plots(folder: Path | None) -> None:
    """Raises `OptionError` if plots cannot be written into `folder`."""
    from mxcompile.report.forms.plots import figure

    check_folder(folder)
    if folder is not None:
        figure()


def check_picture(path: Path) -> None:
    """Raises `OptionError` if `path` has no suffix of a plot or matplotlib is missing."""
    from mxcompile.report.files import form_of
    from mxcompile.report.forms.plots import SUFFIXES, figure

    form_of(path, dict.fromkeys(SUFFIXES), "plot")
    figure()


def device(name: str | None) -> str:
    """Returns the device `name`, or the accelerator, or the CPU. Raises `OptionError` if it is missing."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    present = [*(["cuda"] if count else []), *(f"cuda:{index}" for index in range(count)), "cpu"]
    if name is not None and name not in present:
        raise OptionError(not_allowed("device", name, present))
    return name or present[0]


_TALKATIVE = ("transformers", "torchao", "torch.utils._pytree")


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses warnings, and log messages below errors of verbose libraries."""
    before = {name: logging.getLogger(name).level for name in _TALKATIVE}
    for name in before:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def working(label: str) -> Iterator[None]:
    """Shows the text `label` and the elapsed time on a terminal, for work of unknown length."""
    from tqdm import tqdm

    done = threading.Event()
    with tqdm(desc=label, disable=None, leave=False, bar_format="{desc} {elapsed}") as bar:

        def tick() -> None:
            while not done.wait(0.5):
                bar.refresh()

        ticking = threading.Thread(target=tick, daemon=True)
        if not bar.disable:
            ticking.start()
        try:
            yield
        finally:
            done.set()
            if not bar.disable:
                ticking.join()
