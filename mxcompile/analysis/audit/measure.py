"""`audit`: measures the numerical errors of quantization in a model on a user's batch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import nn
from tqdm import tqdm

from mxcompile.analysis.audit.collect import numerics
from mxcompile.analysis.audit.text import headline, to_markdown, to_text, view
from mxcompile.analysis.study.interpreter import Run, Sensitivity
from mxcompile.analysis.study.session import LossFunction, Session
from mxcompile.errors import OptionError
from mxcompile.models.arguments import ModelInput, keywords
from mxcompile.policy import Policy
from mxcompile.report import Numerics, Report, files
from mxcompile.report.data import schema

SCHEMA = 1
"""Version of the JSON form."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit(files.LoadedDocument):
    """The report of a model, and the measured errors.

    ``str(audit)`` is a summary and the worst GEMMs and tensors, at most 120 columns wide. `save` writes all
    figures in the form of the file's suffix: ``.txt``, ``.md``, ``.json`` or ``.html``.

    Attributes:
        report: report of the passes.
        numerics: all measured errors.
    """

    report: Report
    numerics: Numerics

    NOUN = "audit"
    FORMS: ClassVar[Mapping[str, Callable[[Any], str]]] = {
        ".txt": lambda audit: f"{to_text(audit.numerics)}\n\n{audit.report}\n",
        ".md": lambda audit: to_markdown(audit.numerics),
        ".json": lambda audit: audit.to_json(),
        ".html": lambda audit: _html(audit),
    }

    def __str__(self) -> str:
        return to_text(self.numerics, rows=20)

    def __repr__(self) -> str:
        """Returns one line, for lists of audits and prompts."""
        return f"<{headline(self.numerics)}>"

    def with_note(self, note: str) -> Audit:
        """Returns a copy with `note` as the first note."""
        notes = (note, *self.numerics.notes)
        return dataclasses.replace(self, numerics=dataclasses.replace(self.numerics, notes=notes))

    def view(self, by: str) -> str:
        """Returns one table for a terminal.

        Args:
            by: "role", "block" or "underflow".

        Raises:
            OptionError: for another value.
        """
        return view(self.numerics, by)

    def to_json(self) -> str:
        """Returns the audit as JSON, with kind and schema version. `from_json` reads it."""
        report = json.loads(self.report.to_json())
        data = {"schema": SCHEMA, "kind": "audit", "report": report, "numerics": self.numerics.to_dict()}
        return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Audit:
        """Returns the audit that `to_json` wrote. Raises `OptionError` with the JSON path of a fault."""
        data = schema.opened(text, "audit", SCHEMA)
        for key in ("report", "numerics"):
            if key not in data:
                raise OptionError(f"$: key {key!r} is missing")
        report = Report.from_json(json.dumps(data["report"]))
        return cls(report=report, numerics=Numerics.from_dict(data["numerics"]))

    def plot(self, folder: str | Path) -> list[Path]:
        """Draws gemms.png, tensors.png and scales.png into `folder` with matplotlib.

        Returns:
            The files written. There is none for data that was not measured.

        Raises:
            OptionError: without matplotlib.
        """
        from mxcompile.analysis.audit.plot import plot

        return plot(self.numerics, Path(folder))


def _html(audit: Audit) -> str:
    from mxcompile.report.forms.html import to_html

    return to_html(audit.report, audit.numerics)


def audit(
    model: nn.Module,
    *args: Any,
    policy: Policy | str | dict[str, Any] | None = None,
    loss_fn: LossFunction | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **inputs: ModelInput,
) -> Audit:
    """Measures the errors that `policy` causes in one call of `model`, forward and backward.

    The model runs twice, unquantized and under the policy, and the gradients of both runs are kept for the
    comparison. If the main output is differentiable, a third, unquantized run estimates the effect of each
    forward GEMM's error on the output; it keeps this error until the backward of the GEMM.

    Args:
        model: model on a device that can run it, in training or evaluation mode. Weights, buffers, gradients
            and random number generators are restored bit by bit.
        *args: positional arguments of the call.
        policy: policy as in the backend's option.
        loss_fn: function from the output of the model to a scalar loss. By default the loss is the output if
            it is a scalar, or its ``loss``. Without a loss, or with gradients disabled, backward is not
            audited, and the result has a note.
        kwargs: keyword arguments of the call that are also options of this function.
        **inputs: keyword arguments of the call (see `models.arguments`).

    Returns:
        An `Audit`.

    Raises:
        OptionError: for a keyword that neither `audit` nor the model accepts.
        ModelError: if the model cannot be captured or fails.
        PolicyError: for an invalid policy.
    """
    return audited(Session(model, args, keywords("audit", locals()), policy=policy, loss_fn=loss_fn))


def audited(session: Session) -> Audit:
    """Returns the audit of `session`, which has not run yet."""
    with tqdm(desc="audit: tracing", unit="GEMM", disable=None, leave=False) as bar:
        expected, runs = 0, 2

        def step(stage: str) -> None:
            bar.total = max(runs * (expected or len(session.sites.products)), bar.n + 1)
            bar.set_description(f"audit: {stage}", refresh=False)
            bar.update()

        plain = Run(quantized=lambda _: False, on_product=lambda: step("unquantized"))
        reference = session.run(plain, backward=True)
        expected = int(bar.n)  # the actual number: without a loss no backward runs
        runs += reference.differentiable
        run = Run(quantized=lambda _: True, observe=True, on_product=lambda: step("quantized, measured"))
        outcome = session.run(run, backward=True)
        reach = Sensitivity()
        if reference.differentiable:
            reaching = Run(
                quantized=lambda _: False, reach=reach, on_product=lambda: step("how far errors reach")
            )
            session.run(reaching, backward=True)
    return Audit(report=session.report(), numerics=numerics(session, run, outcome, reference, reach))
