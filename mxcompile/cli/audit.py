"""``mxcompile audit``: the numerical errors of quantization, measured on a batch."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxcompile.cli import arguments
from mxcompile.errors import CheckpointError, ModelError

if TYPE_CHECKING:
    from mxcompile.models.named import LoadedModel


def add_measured(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of commands that run a model to measure it."""
    arguments.add_model(command)
    arguments.add_policy(command)
    command.add_argument(
        "--weights",
        type=Path,
        metavar="FILE|DIR",
        help="safetensors to load the model's weights from, such as a checkpoint of a run",
    )
    command.add_argument("--inference", action="store_true", help="evaluation mode, forward only")
    command.add_argument("--device", default="cpu", help="device to run on, such as cuda (default cpu)")
    command.add_argument(
        "--seed", type=arguments.seed, default=0, help="seed of random weights and inputs (default 0)"
    )


@contextmanager
def measured(options: argparse.Namespace) -> Iterator[LoadedModel]:
    """Yields the model of `add_measured`, ready to run."""
    import torch
    from torch.utils._pytree import tree_map_only

    from mxcompile.analysis.study.session import NEEDS_VALUES, on_meta
    from mxcompile.checkpoint.files import Checkpoint
    from mxcompile.checkpoint.load import from_directory, load_weights
    from mxcompile.models.named import load_model

    where = arguments.device(options.device)
    checkpoint = None
    if options.weights is not None:
        try:
            checkpoint = Checkpoint.open(options.weights)
        except CheckpointError as error:
            raise CheckpointError(
                f"--weights {error}; a factory, package.module:factory, can read files of any kind"
            ) from None
    torch.manual_seed(options.seed)
    sizes = arguments.selected(options, "batch", "length", "dtype")
    loaded = load_model(options.model, from_directory, **sizes)
    if checkpoint is not None:
        load_weights(loaded.model, checkpoint)
        loaded = dataclasses.replace(loaded, made_up="inputs" if loaded.made_up else "")
    inputs = loaded.args, loaded.kwargs
    if on_meta((*loaded.model.parameters(), *loaded.model.buffers(), inputs)):
        raise ModelError(f"cannot run {options.model}: {NEEDS_VALUES}")
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(where), inputs)
    loaded = dataclasses.replace(loaded, model=loaded.model.to(where), args=args, kwargs=kwargs)
    if note := random_note(loaded):
        print(note, file=sys.stderr)
    if options.inference:
        loaded.model.eval()
    with torch.set_grad_enabled(not options.inference):
        yield loaded


def random_note(loaded: LoadedModel) -> str:
    """Returns a note about random inputs or weights; "" if nothing is random."""
    if not loaded.made_up:
        return ""
    return (
        f"random {loaded.made_up}: the loss and its gap mean little for {loaded.name}; name a factory,"
        f" package.module:factory, that returns real {loaded.made_up}"
    )


def noted(result: Any, loaded: LoadedModel) -> Any:
    """Returns `result` with the note of `random_note`, if any."""
    note = random_note(loaded)
    return result.with_note(note) if note else result


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser(
        "audit",
        help="measure the errors of quantization in a model's numbers on a batch",
        description="Run a model unquantized and under a policy, forward and backward, and print the error of"
        " every GEMM, every cast and every gradient, the most harmful first. The model is not changed.",
    )
    add_measured(command)
    arguments.add_output(command, "write all measurements; .txt .md .json .html chooses the form")
    command.add_argument(
        "--by",
        choices=("role", "block", "underflow"),
        help="print one table instead: by role, by block, or by share cast to zero",
    )
    command.add_argument(
        "--plots", type=Path, metavar="DIR", help="folder for the pictures gemms.png, tensors.png, scales.png"
    )
    command.add_argument(
        "--compare",
        metavar="POLICIES",
        help="policies to compare, separated by commas: SQNR of every GEMM, gradients, loss",
    )
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command. Returns the exit status."""
    from mxcompile.analysis.audit import Audit, audit
    from mxcompile.analysis.compare import compare

    if options.compare is not None:
        reason = "--compare prints its tables and nothing else"
        arguments.leave_out(options, reason, "output", "by", "plots")
        policies = arguments.policies_of(options.compare)
        with arguments.quiet(), measured(options) as loaded:
            comparison = compare(loaded.model, *loaded.args, policies=policies, kwargs=loaded.kwargs)
        print(noted(comparison, loaded))
        return 0
    arguments.check_output(options, Audit.form_of)
    arguments.check_plots(options.plots)
    with arguments.quiet(), measured(options) as loaded:
        audited = audit(loaded.model, *loaded.args, policy=options.policy, kwargs=loaded.kwargs)
    result = noted(audited, loaded)
    print(result if options.by is None else result.view(options.by))
    if options.output is not None:
        result.save(options.output)
        print(f"\nwritten to {options.output}")
    if options.plots is not None:
        print(f"drawn: {', '.join(map(str, result.plot(options.plots)))}")
    return 0
