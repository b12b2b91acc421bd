"""`audit`: what quantization does to the numbers of a model on a batch of the user's own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from tqdm import tqdm

from mxcompile.analysis.audit.collect import numerics
from mxcompile.analysis.audit.interpreter import Run
from mxcompile.analysis.audit.output_sensitivity import Sensitivity
from mxcompile.analysis.audit.session import LossFunction, Session
from mxcompile.errors import OptionError
from mxcompile.models.arguments import ModelInput, keywords
from mxcompile.policy import Policy
from mxcompile.report import Numerics, Report, files, schema
from mxcompile.report.forms import framed

SCHEMA = 1
"""Version of the JSON form."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """The report of a model, which says what was quantized, and the errors measured.

    ``str(audit)`` is a summary and the worst GEMMs and tensors, at most 120 columns wide. `save` writes all
    there is in the form its suffix names.
    """

    report: Report
    numerics: Numerics

    def __str__(self) -> str:
        from mxcompile.analysis.audit.text import to_text

        return to_text(self.numerics, rows=20)

    def __repr__(self) -> str:
        """Returns one line, for lists of audits and prompts."""
        from mxcompile.analysis.audit.text import headline

        return f"<{headline(self.numerics)}>"

    def _repr_html_(self) -> str:
        """Returns the page in a frame, for notebooks."""
        return framed(_html(self))

    def with_note(self, note: str) -> Audit:
        """Returns the audit with `note` as the first one of its numbers."""
        notes = (note, *self.numerics.notes)
        return dataclasses.replace(self, numerics=dataclasses.replace(self.numerics, notes=notes))

    def view(self, by: str) -> str:
        """The numbers as a table of another order: one of `VIEWS`. Raises `OptionError` for another word."""
        from mxcompile.analysis.audit.text import view

        return view(self.numerics, by)

    def to_json(self) -> str:
        """The report and the numbers as JSON, with kind and version; `from_json` reads it back."""
        report = json.loads(self.report.to_json())
        data = {"schema": SCHEMA, "kind": "audit", "report": report, "numerics": self.numerics.to_dict()}
        return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Audit:
        """The audit `to_json` wrote. Raises `OptionError` for anything else."""
        data = schema.opened(text, "audit", SCHEMA)
        for key in ("report", "numerics"):
            if key not in data:
                raise OptionError(f"$: key {key!r} is missing")
        report = Report.from_json(json.dumps(data["report"]))
        return cls(report=report, numerics=Numerics.from_dict(data["numerics"]))

    @classmethod
    def load(cls, path: str | Path) -> Audit:
        """The audit kept in the JSON file `path`. Raises `OptionError` that names the file and the fault."""
        return files.load(path, "audit", cls.from_json)

    def save(self, path: str | Path) -> None:
        """Write the audit to `path`: ``.txt``, ``.md``, ``.json`` or ``.html``. Raises `OptionError`."""
        files.save(path, form_of(path)(self), "audit")

    def plot(self, folder: str | Path) -> list[Path]:
        """Draw gemms.png, tensors.png and scales.png into `folder`; returns what was written.

        Needs matplotlib. Raises `OptionError` without it.
        """
        from mxcompile.analysis.audit.plot import plot

        return plot(self.numerics, Path(folder))


def _text(audit: Audit) -> str:
    from mxcompile.analysis.audit.text import to_text

    return f"{to_text(audit.numerics)}\n\n{audit.report}\n"


def _markdown(audit: Audit) -> str:
    from mxcompile.analysis.audit.text import to_markdown

    return to_markdown(audit.numerics)


def _html(audit: Audit) -> str:
    from mxcompile.report.forms.html import to_html

    return to_html(audit.report, audit.numerics)


FORMS: dict[str, Callable[[Audit], str]] = {
    ".txt": _text,
    ".md": _markdown,
    ".json": Audit.to_json,
    ".html": _html,
}
"""How an audit is written, by file suffix."""


def form_of(path: str | Path) -> Callable[[Audit], str]:
    """The writer for `path`. Raises `OptionError` for a suffix without one."""
    return files.form_of(path, FORMS, "audit")


def audit(
    model: nn.Module,
    *args: Any,
    policy: Policy | str | dict[str, Any] | None = None,
    loss_fn: LossFunction | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **inputs: ModelInput,
) -> Audit:
    """Measure what `policy` does to the numbers of one call of `model`, forward and backward.

    model: on any device that can run it, in training or evaluation mode as it is. It is left as it is, bit
    for bit: weights, buffers, gradients, random number generators. args, inputs, kwargs: what it is called
    with (see `models.arguments`). policy: as the backend's option. loss_fn: from the output of the model to a
    scalar loss; by default the output itself if it is a scalar, or its ``loss``. Without a loss, or where
    gradients are off, backward is not audited and a note says so.

    The model runs twice: unquantized, for comparison, and under the policy; the gradients of both are kept
    for that. If gradients of the main output exist, a third, unquantized run estimates how far the error of
    each forward GEMM reaches; it keeps that error until the GEMM's backward. Returns an `Audit`. Raises
    `OptionError` for a keyword nobody takes, `ModelError` if the model cannot be captured or fails,
    `PolicyError` for an invalid policy.
    """
    named = keywords("audit", model, inputs, kwargs, {"policy": policy, "loss_fn": loss_fn})
    session = Session(model, args, named, policy=policy, loss_fn=loss_fn)
    with tqdm(desc="audit: tracing", unit="GEMM", disable=None, leave=False) as bar:
        counted: list[int] = []
        runs = 2

        def step(what: str) -> None:
            expected = counted[0] if counted else len(session.sites.products)
            bar.total = max(runs * expected, bar.n + 1)
            bar.set_description(f"audit: {what}", refresh=False)
            bar.update()

        plain = Run(quantized=lambda _: False, on_product=lambda: step("unquantized"))
        reference = session.run(plain, backward=True)
        counted.append(int(bar.n))  # without a loss no backward has run
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
