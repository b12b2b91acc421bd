"""The HTML form: well formed, complete, self-contained, and names in it are data."""

from __future__ import annotations

import dataclasses
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_reports import X, kept, picture, record, report, training, whole_report

from mxcompile.report import GemmNumerics, Numerics, Outline, Part, Report, TensorNumerics
from mxcompile.report.forms.html import to_html

VOID = {"meta", "input", "br", "hr", "img", "link"}
ATTACK = (
    "</script></style><script>alert(1)</script><img src=x onerror=alert(1)>\"' {{ words }} {% raw %} &amp;"
)


class Page(HTMLParser):
    """The elements of a page. Fails on one that is closed in the wrong order or not at all."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.stack: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[tuple[str, str]] = []
        self.feed(html)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack[-1] == tag, (self.stack, tag)
        self.stack.pop()

    def handle_data(self, data: str) -> None:
        if self.stack:
            self.text.append((self.stack[-1], data.strip()))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.elements if name == tag]

    def texts(self, tag: str) -> list[str]:
        return [text for name, text in self.text if name == tag and text]


def numerics(name: str = "layers.0.up") -> Numerics:
    tensor = {
        "name": name, "role": "ffn_in", "operand": "x", "layout": "rowwise", "gemms": ("fprop",),
        "elem": "e4m3", "rounding": "rceil", "numel": 64, "amax": 1.0, "cosine": 0.999, "mse": 1e-3,
        "rel_error": 0.02,
        "underflow": 0.01, "saturation": 0.0, "scale_histogram": ((117, 3), (120, 9), (255, 1)),
    }  # fmt: skip
    gemm = {
        "name": name, "role": "ffn_in", "gemm": "fprop", "m": 64, "n": 96, "k": 32, "cosine": 0.99,
        "mse": 1e-3,
    }  # fmt: skip
    return Numerics(
        tensors=tuple(TensorNumerics(**tensor, sqnr_db=db) for db in (30.0, math.nan, math.inf)),
        gemms=tuple(GemmNumerics(**gemm, sqnr_db=28.0 - i, rel_error=0.04 + i / 100) for i in range(30)),
        policy=name,
        loss=2.0,
        loss_reference=1.99,
        loss_gap=0.005,
        logits_sqnr_db=31.5,
        notes=(name,),
    )


@pytest.mark.parametrize(
    "original", [whole_report(), report(kept()), Report.from_parts([], target="", policy="")]
)
def test_the_page_is_well_formed_and_asks_for_nothing(original: Report):
    html = to_html(original, numerics())
    page = Page(html)
    assert not re.search(r"(?i)https?:|//\w+\.|url\((?!#)|@import|\bfetch\(|XMLHttp|import\(", html)
    for _, attributes in page.elements:
        assert not {"src", "href", "srcset", "action", "data", "xlink:href"} & set(attributes)
    assert not {"link", "img", "iframe", "object", "embed", "base"} & {tag for tag, _ in page.elements}
    (policy,) = [meta["content"] for meta in page.of("meta") if meta.get("http-equiv")]
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_every_gemm_of_every_layer_is_in_it():
    gemms = [gemm for i in range(3) for gemm in training(f"layers.{i}.up", kernel=f"kernel of {i % 2}")]
    gemms.append(kept(kernel="aten.addmm"))
    gemms.append(record("x.y", m=1234, formats=(X, X), reason="policy: min_k 256 (k=48)"))
    page = Page(to_html(report(*gemms)))
    assert set(page.texts("li")) == {gemm.name for gemm in gemms}
    cells = page.texts("td") + page.texts("code") + page.texts("span")
    for gemm in gemms:
        assert {gemm.gemm, gemm.kernel or "not lowered", gemm.reason} <= set(cells)
    assert "1234×96×32" in cells
    assert len(page.of("tbody")) == 4  # layers 0 and 2 are equal
    assert len([text for text in page.texts("td") if text in ("fprop", "dgrad", "wgrad")]) == 3 + 3 + 1 + 1


def test_html_escapes_names_from_the_model():
    outline, words = picture(), dict.fromkeys(("label", "detail", "shape", "role", "source"), ATTACK)
    nodes = tuple(dataclasses.replace(n, names=(ATTACK, *n.names), **words) for n in outline.nodes)
    words = dict.fromkeys(("role", "kernel", "module", "source", "reason"), ATTACK)
    attacked = record(ATTACK, formats=(dataclasses.replace(X, elem=ATTACK),), **words)
    part = Part(gemms=(attacked,), outline=dataclasses.replace(outline, nodes=nodes), warnings=(ATTACK,))
    page = Page(to_html(Report.from_parts([part], target=ATTACK, policy=ATTACK), numerics(ATTACK)))
    assert len(page.of("script")) == 1
    assert len(page.of("style")) == 1
    assert page.of("img") == []
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert "alert(1)" not in " ".join(text for tag, text in page.text if tag in ("script", "style"))
    assert ATTACK in page.texts("li")


def test_the_picture_has_its_nodes_and_their_details():
    page = Page(to_html(whole_report()))
    nodes = [attrs for tag, attrs in page.elements if tag == "g" and "data-node" in attrs]
    assert [node["data-node"] for node in nodes] == ["0", "1", "2", "3", "4"]
    assert {attrs["data-details"] for attrs in page.of("div") if "data-details" in attrs} == set("01234")
    assert all(node["tabindex"] == "0" and node["role"] == "button" and node["aria-label"] for node in nodes)
    assert [attrs["data-edge"] for attrs in page.of("path") if "data-edge" in attrs] == ["0 1", "1 2", "2 3"]
    assert "model.py:12" in page.texts("span")
    assert page.texts("summary") == ["1 layer", "1 layer"]  # in the table, not in the details again
    tags = page.texts("text")
    assert tags.count("MXFP8") == 2  # said in words, not by colour alone
    assert tags.count("BF16") == 1


def test_the_line_of_source_is_shown(tmp_path: Path):
    (tmp_path / "model.py").write_text("a\n  y = self.up(x) < 1\n")
    (tmp_path / "secret.txt").write_text("a\nsecret\n")
    files = {"a": "model.py:2", "b": "secret.txt:2", "c": "model.py:99"}
    records = [record(name, source=f"{tmp_path}/{file}") for name, file in files.items()]
    html = to_html(report(*records, record("d", source="nowhere.py:x")))
    assert "<code>y = self.up(x) &lt; 1</code>" in html
    assert ">secret<" not in html
    assert "nowhere.py:x" in html


def test_html_sections_appear_only_with_content():
    bare = to_html(report(kept()))
    for section in ('id="graph"', 'id="numerics"', 'id="estimate"', 'class="warnings"'):
        assert section not in bare
    full = whole_report()
    summary = dataclasses.replace(full.summary, estimate_us=2000.0, estimate_bf16_us=3000.0)
    gemms = tuple(dataclasses.replace(g, estimate_us=2.0, estimate_bf16_us=1.0) for g in full.gemms)
    page = Page(to_html(dataclasses.replace(full, summary=summary, gemms=gemms), numerics()))
    assert {"graph", "layers", "numerics", "estimate"} <= {str(a.get("id")) for a in page.of("section")}
    assert "1.50×" in page.texts("b")
    assert "0.50× slower" in page.texts("b")


def test_the_worst_numerics_come_first():
    page = Page(to_html(whole_report(), numerics()))
    values = [text for text in page.texts("span") if re.fullmatch(r"-?[\d.]+ dB|not finite|exact", text)]
    assert values[:3] == ["-1.0 dB", "-1.0 dB", "0.0 dB"]  # of the role; of the GEMMs
    assert values[31:] == ["not finite", "30.0 dB", "exact"]


def test_numerics_are_searched_and_sorted():
    """Every column has a head to sort by, and every row the names to find it by."""
    tables = re.findall(r'<div class="searched">.*?</table>', to_html(whole_report(), numerics()), re.DOTALL)
    assert len(tables) == 3
    for table in tables:
        (head,) = re.findall(r"<thead>.*?</thead>", table, re.DOTALL)
        rows = re.findall(r"<tr data-names=.*?</tr>", table, re.DOTALL)
        assert head.count("<th ") + head.count("<th>") == head.count("data-sort")
        assert {row.count("<td") for row in rows} == {head.count("data-sort")}
        assert ("data-search" in table) == (len(rows) > 8)
        assert set(re.findall('data-names="([^"]*)"', table)) in ({"layers.0.up"}, {"ffn_in"})


def test_many_graphs_are_not_all_drawn():
    parts = [Part(gemms=(kept(),), outline=picture())] * 20
    page = Page(to_html(Report.from_parts(parts, target="cpu", policy="p")))
    assert len([a for a in page.of("div") if "data-graph" in a]) == 12
    assert "and 8 more graphs" in page.texts("p")


def test_nodes_left_out_are_counted():
    outline = dataclasses.replace(picture(), omitted=7)
    assert "7 more nodes not drawn" in to_html(report(kept(), outline=outline))
    assert "not drawn" not in to_html(report(kept(), outline=picture()))
    assert "<svg" not in to_html(report(kept(), outline=Outline()))
