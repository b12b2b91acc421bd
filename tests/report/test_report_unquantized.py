"""A report says why little is in MXFP8, and what its share leaves out."""

from made_reports import kept, record, report

from mxcompile.policy import Code, Reason
from mxcompile.report.data.record import NOT_COMPILED
from mxcompile.report.forms.html import to_html

OPAQUE = {"m": None, "n": None, "k": None, "role": "other"}


def test_little_in_mxfp8_is_explained_by_flops():
    stem = kept("stem", m=30, n=10, k=10, reason="convolution 3×3")
    head = kept("head", m=60, n=10, k=10, reason="role head")
    text = str(report(record("up", m=10, n=10, k=10), stem, head))
    assert "10.0% of matmul FLOPs in MXFP8" in text
    assert "90.0% of the FLOPs stay in BF16: 60.0% role head, 30.0% convolution 3×3" in text


def test_layers_that_are_not_compiled_are_among_the_reasons():
    pending = record("down", m=90, n=10, k=10, kernel=NOT_COMPILED)
    text = str(report(record("up", m=10, n=10, k=10), pending))
    assert "90.0% of the FLOPs stay in BF16: 90.0% not compiled yet" in text


def test_much_in_mxfp8_needs_no_reasons():
    text = str(report(record("up", m=60, n=10, k=10), kept(m=40, n=10, k=10)))
    assert "stay in BF16" not in text
    assert "unknown" not in text


def test_headline_counts_products_of_unknown_flops():
    reason = Reason(Code.UNCOUNTED, "lib.attention")
    unknown = kept("attn", reason=str(reason), code=str(reason.code), facts=reason.facts, **OPAQUE)
    summary_report = report(record(), unknown, unknown)
    first = str(summary_report).splitlines()[0]
    assert "100.0% of known matmul FLOPs in MXFP8, 2 products of unknown FLOPs not in it" in first
    made_html = to_html(summary_report)
    sentence = "not in the share, since their FLOPs are unknown: opaque operator lib.attention (×2)"
    assert sentence in made_html
    assert sentence in " ".join(str(summary_report).split())


def test_report_without_products_states_it():
    assert "no matrix product was captured" in str(report())
