"""The forms of a report: text, Markdown and JSON, and the files they are kept in."""

from __future__ import annotations

import html
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_reports import DY, W, X, kept, record, report, training, whole_report
from markdown_it import MarkdownIt

from mxcompile.errors import OptionError
from mxcompile.report import FORMS, GemmRecord, Part, Report
from mxcompile.report.forms.html import to_html
from mxcompile.report.forms.text import to_markdown

LONG = st.integers(1, 300).map(lambda length: ("layer.up_proj." * 30)[:length])
GEMMS = st.builds(
    GemmRecord,
    name=LONG,
    role=st.sampled_from(["qkv", "expert_out", "attn_scores"]),
    gemm=st.sampled_from(["fprop", "dgrad", "wgrad"]),
    m=st.integers(0, 1 << 22),
    n=st.integers(0, 1 << 22),
    k=st.integers(0, 1 << 22),
    batch=st.integers(1, 4096),
    precision=st.sampled_from(["mxfp8", "bf16"]),
    reason=LONG,
    kernel=st.just("") | LONG,
    formats=st.sampled_from([(), (X, W), (replace(DY, elem="e5m2"), replace(W, block="32x32"))]),
)


@settings(max_examples=150, deadline=None)
@given(gemms=st.lists(GEMMS, max_size=5), policy=LONG, warnings=st.lists(LONG, max_size=2))
def test_text_is_at_most_120_columns_wide(gemms, policy: str, warnings: list[str]):
    parts = [Part(gemms=tuple(gemms), warnings=tuple(warnings), saved_bytes=1, saved_bytes_bf16=2)]
    assert max(map(len, str(Report.from_parts(parts, target="sm_100", policy=policy)).splitlines())) <= 120


def test_a_long_name_is_whole_on_several_lines():
    name = "model.language_model." + "transformer." * 20 + "layers.mlp.up_proj"
    _, _, rows = str(report(record(name))).partition("\n------")
    first = rows.partition("\n\n")[0].splitlines()[1:]
    assert "".join(line.split(" ")[0] for line in first) == name
    assert len(first) > 2


def test_names_and_kernels_that_fit_are_shown_in_full():
    name = "model.language_model.layers.0.mlp.up_proj"
    why = {"reason": "preset nvidia: role ffn_in", "code": "preset and role", "facts": ("nvidia", "ffn_in")}
    text = str(report(record(name, **why, kernel="k" * 50)))
    assert name in text
    assert re.search(r"ffn_in .* preset nvidia$", text, re.MULTILINE)  # the role has a column
    assert "k" * 50 in text


def test_the_names_of_deep_models_fit():
    name = "decoder.block.0-23.layer.1.EncDecAttention.q"
    gemms = [g for i in range(24) for g in training(f"decoder.block.{i}.layer.1.EncDecAttention.q")]
    assert name in str(report(*gemms, record("x", role="attn_scores", m=4096, n=128256, k=16384)))


def test_the_gemm_that_differs_is_named():
    fprop, dgrad, wgrad = training("a")
    assert "mxfp8; wgrad bf16" in str(report(fprop, dgrad, replace(wgrad, precision="bf16", formats=())))


def test_kernels_whose_formats_do_not_agree_are_rows_of_their_own():
    other = record("b", kernel="mm", formats=(replace(X, elem="e5m2"), W))
    text = str(report(record("a", kernel="mm"), other))
    assert "x, w: e4m3 1x32 rceil" in text
    assert "x: e5m2 1x32 rceil; w: e4m3 1x32 rceil" in text


def test_estimates_are_labelled_as_not_measured():
    gemms = [record(name, estimate_us=us, estimate_bf16_us=3.0) for name, us in (("a", 2.0), ("b", 4.0))]
    base = report(*gemms, kept(estimate_us=1.0, estimate_bf16_us=1.0))
    text = str(replace(base, summary=replace(base.summary, estimate_us=7000.0, estimate_bf16_us=7700.0)))
    assert "estimate, not measured: matmuls and casts 7 ms, 7.7 ms in BF16 (1.10×)" in text
    assert "warning: estimated slower than in BF16: b (0.75×)\n" in text
    assert re.search(r"^a .* 1\.50×", text, re.MULTILINE)
    assert "1.00×" not in text


def test_text_of_a_training_report():
    text = str(
        report(
            *[gemm for i in range(4) for gemm in training(f"layers.{i}.up", kernel="aten.mm")],
            kept(kernel="aten.addmm"),
            saved_bytes=3 << 20,
            saved_bytes_bf16=4 << 20,
            weights=(("layers.0.up", 100, 50, 100),),
            pass_time_us=12_300.0,
            graph_breaks=1,
            cache="miss",
            warnings=("rule 3 matched no layer",),
        )
    )
    assert text.splitlines() == [
        "MXFP8 report: 92.3% of matmul FLOPs in MXFP8 (13 GEMMs, 5.11 MFLOP, 64 tokens,"
        " target cpu, policy preset nvidia)",
        "saved for backward: 3.0 MiB (75% of 4.0 MiB without mxcompile)",
        "weights of linear layers: 100 B (50 B in BF16)",
        "1 graph, 1 graph break, passes 12 ms, Inductor cache miss",
        "warning: rule 3 matched no layer",
        "",
        "layer              role    m×n×k     precision    reason",
        "-------------  --  ------  --------  -----------  --------------",
        "layers.0-3.up  ×4  ffn_in  64×96×32  mxfp8        policy: rule 1",
        "lm_head            head    64×96×32  bf16         role head",
        "",
        "precision    kernel      formats                    GEMMs    FLOPs",
        "-----------  ----------  -------------------------  -------  -------",
        "mxfp8        aten.mm     x, w, dy: e4m3 1x32 rceil  12       92.3%",
        "bf16         aten.addmm  -                          1        7.7%",
    ]


def test_operands_of_different_formats_are_listed_separately():
    gemm = record(formats=(replace(DY, elem="e5m2"), replace(W, block="32x32")))
    assert "w: e4m3 32x32 rceil; dy: e5m2 1x32 rceil" in str(report(gemm))


def test_layer_run_in_two_precisions_lists_both():
    other = record(source="a.py:1", precision="bf16", reason="role other")
    text = str(report(record(source="a.py:1"), other))
    assert "bf16/mxfp8" in text
    assert "policy: rule 1; role other" in text


def test_batched_product_is_shown_with_its_batch_size():
    assert "8·64×96×32" in str(report(record(batch=8)))


def test_the_root_module_and_kernels_to_come_have_words():
    text = str(report(record(name="")))
    assert "(root)" in text
    assert "not lowered" in text


def test_report_without_graphs_prints_zero_gemms():
    assert str(Report.from_parts([], target="cpu", policy="preset nvidia")) == (
        "MXFP8 report: 0.0% of matmul FLOPs in MXFP8 (0 GEMMs, target cpu, policy preset nvidia)\n"
        "no matrix product was captured; compiled: nothing, as no graph was captured\n"
        "0 graphs, 0 graph breaks, passes 0 ms, Inductor cache off"
    )


def cells(line: str) -> list[str]:
    """The cells of one line of a GitHub table."""
    assert line.startswith("|")
    assert line.endswith("|")
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def tables(markdown: str) -> list[list[list[str]]]:
    """The tables of `markdown`: blocks between empty lines, each a header, a rule and rows."""
    blocks = [block.splitlines() for block in markdown.split("\n\n") if block.startswith("|")]
    for header, rule, *_ in blocks:
        assert all(re.fullmatch(":?-+:?", cell) for cell in cells(rule))
        assert len(cells(rule)) == len(cells(header))
    return [[cells(line) for i, line in enumerate(block) if i != 1] for block in blocks]


def markdown(subject: Report) -> str:
    return Report.form_of("report.md")(subject)


def test_markdown_is_github_tables_of_whole_cells():
    name = "model." + "transformer." * 20 + "up"
    layer_table, kernel_table = tables(markdown(report(*training(name, kernel="aten.mm"), kept())))
    assert layer_table[:2] == [
        ["layer", "", "role", "m×n×k", "precision", "reason"],
        [name, "", "ffn_in", "64×96×32", "mxfp8", "policy: rule 1"],
    ]
    assert kernel_table[0] == ["precision", "kernel", "formats", "GEMMs", "FLOPs"]
    assert [len(row) for row in layer_table + kernel_table] == [6] * 3 + [5] * 3


def test_a_bar_in_a_cell_does_not_split_it():
    layer_table, _ = tables(markdown(report(record("a|b", reason="x || y"))))
    assert (layer_table[1][0], layer_table[1][-1]) == (r"a\|b", r"x \|\| y")


def test_markdown_opens_with_a_heading_and_facts():
    lines = markdown(report(kept(), warnings=("one\ntwo",))).splitlines()
    assert lines[0].startswith("### MXFP8 report: 0.0% of matmul FLOPs in MXFP8 (1 GEMM, ")
    assert (lines[1], lines[2]) == ("", "- 100.0% of the FLOPs stay in BF16: 100.0% role head")
    assert lines[3].startswith("- 1 graph, 0 graph breaks")
    assert lines[4:6] == ["- warning: one two", ""]


def test_markdown_of_an_empty_report_has_no_table():
    assert tables(markdown(Report.from_parts([], target="cpu", policy="p"))) == []


@pytest.mark.parametrize("suffix", FORMS)
def test_a_report_is_saved_in_the_form_of_its_suffix(suffix: str, tmp_path: Path):
    path = tmp_path / "new" / "folder" / f"report{suffix}"
    whole_report().save(path)
    text = path.read_text(encoding="utf-8")
    assert text == FORMS[suffix](whole_report())
    assert "ünï" in text
    assert text.endswith("\n")


def test_text_and_json_files_equal_the_forms_in_python(tmp_path: Path):
    original = whole_report()
    original.save(str(tmp_path / "report.txt"))
    original.save(str(tmp_path / "report.json"))
    assert (tmp_path / "report.txt").read_text() == f"{original}\n"
    assert Report.from_json((tmp_path / "report.json").read_text()) == original


@pytest.mark.parametrize(
    ("name", "piece"),
    [
        ("report.jsn", "unknown suffix '.jsn' (did you mean '.json'?); allowed: .txt, .md"),
        ("report.JSON", "unknown suffix '.JSON' (did you mean '.json'?)"),
        ("report", "unknown suffix ''; allowed: .txt"),
        ("report.json.gz", "unknown suffix '.gz'"),
    ],
)
def test_an_unknown_suffix_is_an_error_that_writes_nothing(name: str, piece: str, tmp_path: Path):
    path = tmp_path / "folder" / name
    with pytest.raises(OptionError) as caught:
        whole_report().save(path)
    assert repr(str(path)) in str(caught.value)
    assert piece in str(caught.value)
    assert [*tmp_path.iterdir()] == []


def test_report_has_the_bytes_of_weights_when_stored():
    weights = (("up", 6144, 6144, 3168),)
    stored = "3.1 KiB as quantize_weights_ would store them"
    quantized = report(*training("up"), weights=weights)
    assert f"weights of linear layers: 6.0 KiB ({stored})\n" in str(quantized)
    assert stored in to_html(quantized)
    assert "weights of linear layers: 6.0 KiB\n" in str(report(weights=(("up", 6144, 6144, 6144),)))


def test_more_saved_bytes_than_in_bf16_give_a_warning():
    text = str(report(*training("up"), saved_bytes=106, saved_bytes_bf16=100))
    assert "warning: more is kept for backward than in BF16" in text
    assert "warning: more is kept" not in str(report(*training("up"), saved_bytes=99, saved_bytes_bf16=100))


NAMES_WITH_SIGNS = [
    "a*b*c", "__init__", "x_y", "_x", "a|b", "<b>x</b>", "`code`", "[l](u)", "~~no~~",
    "&amp;", "\\*", "a  b", "re:.*\\.q",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES_WITH_SIGNS)
def test_markdown_escapes_names_from_the_model(name: str):
    """Held to a parser of Markdown: what a reader sees is the name."""
    original = Report.from_parts([Part(gemms=(record(name),), warnings=(name,))], target="cpu", policy=name)
    page = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(to_markdown(original))
    shown = [html.unescape(re.sub(r"<[^>]*>", "", line)) for line in page.splitlines()]
    expected = " ".join(name.split())
    assert expected in shown
    assert f"warning: {expected}" in shown
    assert any(line.endswith(f"policy {expected})") for line in shown)


def test_at_a_prompt_a_report_is_one_line():
    original = report(*training("layers.0.up"), kept())
    assert repr([original]) == f"[<{str(original).splitlines()[0]}>]"
    page = original._repr_html_()
    assert page.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert page.endswith("</iframe>")
    assert "<script" not in page
