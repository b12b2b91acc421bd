"""`mxcompile diff`: what changed, and the exit status continuous integration looks at."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from made_reports import W, X, kept, record, report, training

from mxcompile.cli.main import main
from mxcompile.policy import Code, Reason
from mxcompile.report import GemmRecord, Report
from mxcompile.report.diff import compare

LAYERS = [gemm for i in range(8) for gemm in training(f"layers.{i}.up", kernel="a")]
OLD = report(*LAYERS, kept(), saved_bytes=1024, saved_bytes_bf16=2048)


def to_bf16(gemm: GemmRecord, reason: str = "policy: rule 2") -> GemmRecord:
    return replace(gemm, precision="bf16", formats=(), reason=reason)


def changed(old: Report, new: Report) -> list[tuple[str, tuple[str, ...], tuple[str, ...], str, str, str]]:
    return [(c.kind, c.names, c.gemms, c.what, c.before, c.after) for c in compare(old, new).changes]


def test_equal_reports_have_no_changes():
    diff = compare(OLD, OLD)
    assert (diff.changes, diff.fell_back, str(diff)) == ((), (), "the same for every layer")


def test_layers_that_fell_back_alike_are_one_change():
    new = report(*(to_bf16(g) if g.name in ("layers.2.up", "layers.3.up") else g for g in LAYERS), kept())
    names, gemms = ("layers.2.up", "layers.3.up"), ("fprop", "dgrad", "wgrad")
    assert changed(OLD, new) == [("fell back", names, gemms, "precision", "mxfp8", "bf16")]
    text = str(new.since(OLD))
    assert text.splitlines()[0] == "2 layers fell back from MXFP8"
    assert "matmul FLOPs in MXFP8: 96.0% → 72.0%" in text
    assert "saved for backward: 1.0 KiB → none" in text
    assert "fell back  layers.2-3.up  ×2  ffn_in  all" in text
    assert text.rstrip().endswith("mxfp8 → bf16  policy: rule 2")
    assert (new.since(OLD).fell_back, OLD.since(new).fell_back) == (names, ())
    assert [change.kind for change in OLD.since(new).changes] == ["gained"]


def test_layers_that_fell_back_for_reasons_of_one_code_are_one_change():
    reasons = {f"layers.{k}.up": Reason(Code.LIMIT, f"min_k 256 (k={k})") for k in (2, 3, 5)}
    reasons["layers.4.up"] = Reason(Code.DTYPE, "int8")

    def now(gemm: GemmRecord) -> GemmRecord:
        why = reasons.get(gemm.name)
        return gemm if why is None else replace(to_bf16(gemm, str(why)), code=str(why.code), facts=why.facts)

    diff = compare(OLD, report(*map(now, LAYERS), kept()))
    assert [(change.names, change.code, change.reason) for change in diff.changes] == [
        (("layers.2.up", "layers.3.up", "layers.5.up"), "size limit", "policy: min_k 256 (k=2) and 2 more"),
        (("layers.4.up",), "dtype", "unsupported dtype int8: use FP32, BF16 or FP16"),
    ]


def test_one_gemm_of_a_layer_is_enough_to_fall_back():
    new = report(*LAYERS[:2], to_bf16(LAYERS[2]), *LAYERS[3:], kept())
    assert changed(OLD, new) == [("fell back", ("layers.0.up",), ("wgrad",), "precision", "mxfp8", "bf16")]


def test_a_layer_whose_role_changed_with_its_precision_fell_back():
    old, new = report(record("a", role="qkv")), report(kept("a", role="other"))
    assert new.since(old).fell_back == ("a",)


@pytest.mark.parametrize(
    ("change", "field", "before", "after"),
    [
        ({"kernel": "b"}, "kernel", "a", "b"),
        ({"m": 65}, "size", "64×96×32", "65×96×32"),
        ({"role": "ffn_out"}, "role", "ffn_in", "ffn_out"),
        ({"reason": "policy: rule 9"}, "reason", "policy: rule 1", "policy: rule 9"),
        (
            {"formats": (replace(X, elem="e5m2"), W)},
            "formats",
            "x, w: e4m3 1x32 rceil",
            "x: e5m2 1x32 rceil; w: e4m3 1x32 rceil",
        ),
    ],
)
def test_each_changed_field_is_a_change(change: dict[str, object], field: str, before: str, after: str):
    old = record("a", kernel="a")
    changes = changed(report(old), report(replace(old, **change)))
    assert changes == [("changed", ("a",), ("fprop",), field, before, after)]


def test_new_and_removed_layers_did_not_fall_back():
    old, new = report(record("a"), record("b")), report(record("a"), kept("c"))
    assert changed(old, new) == [
        ("new", ("c",), ("fprop",), "", "", "bf16"),
        ("removed", ("b",), ("fprop",), "", "mxfp8", ""),
    ]
    assert new.since(old).fell_back == ()


def test_diff_separates_the_two_products_of_an_attention():
    scores, values = kept("a", role="attn_scores"), kept("a", role="attn_values", kernel="k")
    assert changed(report(scores, values), report(values, scores)) == []


def test_a_layer_that_runs_twice_is_compared_run_by_run():
    old, new = (report(record("a"), second) for second in (record("a", m=1), to_bf16(record("a", m=1))))
    assert new.since(old).fell_back == ("a",)


def test_diff_shows_changed_settings_and_warnings():
    new = replace(OLD, summary=replace(OLD.summary, policy="b.yaml", graph_breaks=2, warnings=("w",)))
    text = str(new.since(OLD))
    assert "policy: preset nvidia → b.yaml" in text
    assert "graph breaks: 0 → 2" in text
    assert "new warning: w" in text
    assert "no longer warned: w" in str(OLD.since(new))


def test_text_is_at_most_120_columns_wide():
    name = "model." + "transformer." * 20 + "up"
    old, new = report(record(name, kernel="k" * 90)), report(record(name, kernel="l" * 90, reason="r" * 90))
    assert max(map(len, str(new.since(old)).splitlines())) <= 120


def test_names_are_never_cut():
    """Two layers whose names differ in the middle stay two layers for whoever reads."""
    names = [f"model.{'transformer.' * 12}{side}.{'layers.' * 12}up" for side in ("encoder", "decoder")]
    text = str(report(*(kept(name) for name in names)).since(report(*(record(name) for name in names))))
    assert max(map(len, text.splitlines())) <= 120
    whole = "".join(re.sub(r"^(fell back)? *|  .*$", "", line) for line in text.splitlines())
    for name in names:
        assert name in whole
    assert not any("…" in line for line in text.splitlines())


def files(folder: Path, old: Report, new: Report) -> list[str]:
    old.save(folder / "old.json")
    new.save(folder / "new.json")
    return [str(folder / "old.json"), str(folder / "new.json")]


def test_exit_status_of_diff_is_1_if_a_layer_fell_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    paths = files(tmp_path, OLD, report(*LAYERS[:-1], to_bf16(LAYERS[-1]), kept()))
    assert main(["diff", *paths]) == 1
    assert capsys.readouterr().out.startswith("1 layer fell back from MXFP8\n")
    assert main(["diff", *reversed(paths)]) == 0
    assert main(["diff", paths[0], paths[0]]) == 0


def test_markdown_for_a_pull_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lost = report(*LAYERS[:-1], to_bf16(LAYERS[-1], "a | b"), kept())
    assert main(["diff", *files(tmp_path, OLD, lost), "--format", "markdown"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "### 1 layer fell back from MXFP8"
    assert "- matmul FLOPs in MXFP8: 96.0% → 92.0%" in lines
    assert r"a \| b" in "\n".join(lines)
    assert sum(line.startswith("|") for line in lines) == 3


def test_diff_of_a_file_that_is_not_a_report_exits_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    OLD.save(tmp_path / "old.json")
    (tmp_path / "broken.json").write_text("{}")
    assert main(["diff", str(tmp_path / "old.json"), str(tmp_path / "broken.json")]) == 2
    assert "broken.json': $: not an mxcompile report" in capsys.readouterr().err
    assert main(["diff", str(tmp_path / "old.json"), str(tmp_path / "none.json")]) == 2
    with pytest.raises(SystemExit) as caught:
        main(["diff", str(tmp_path / "old.json")])
    assert caught.value.code == 2


CONDITIONS = {"share-drop=5%": 0, "share-drop=0.03": 1, "share-drop=5% --fail-on fallback": 1, "fallback": 1}


@pytest.mark.parametrize("conditions", CONDITIONS)
def test_fail_on_flag_chooses_the_failing_conditions(conditions: str, tmp_path: Path):
    """One of 25 equal GEMMs falls back: 4 % of the FLOPs."""
    paths = files(tmp_path, OLD, report(*LAYERS[:-1], to_bf16(LAYERS[-1]), kept()))
    assert main(["diff", *paths, "--fail-on", *conditions.split()]) == CONDITIONS[conditions]
    assert main(["diff", *reversed(paths), "--fail-on", *conditions.split()]) == 0


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("share-drop", "share-drop needs a limit, such as share-drop=1"),
        ("share-drop=x", "is not a share, such as 0.002 or 0.2%"),
        ("fallback=1", "fallback takes no limit"),
        ("sqnr-drip=1", "unknown condition 'sqnr-drip' (did you mean 'sqnr-drop'?)"),
    ],
)
def test_unknown_fail_on_condition_exits_with_status_2(
    condition: str, message: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as caught:
        main(["diff", "a.json", "b.json", "--fail-on", condition])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_reports_without_a_layer_in_common_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Whatever --fail-on says: nothing was compared."""
    new = report(*training("blocks.0.up", kernel="a"))
    for more in ([], ["--fail-on", "share-drop=99%"]):
        assert main(["diff", *files(tmp_path, OLD, new), *more]) == 1
        output = capsys.readouterr().out
        assert output.splitlines()[0].startswith("no layer in common: ")
        assert "fell back" not in output


def test_diff_fails_on_lower_share_unless_limited_to_fallback(tmp_path: Path):
    """A large layer is new and in BF16: none fell back."""
    new = report(*LAYERS, kept(), replace(kept("new"), n=1 << 16))
    assert new.since(OLD).fell_back == ()
    assert main(["diff", *files(tmp_path, OLD, new)]) == 1
    assert main(["diff", *files(tmp_path, OLD, new), "--fail-on", "fallback"]) == 0


def test_a_condition_of_audits_on_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["diff", *files(tmp_path, OLD, OLD), "--fail-on", "sqnr-drop=1dB"]) == 2
    assert "compares audits, and these files are reports" in capsys.readouterr().err


def test_precisions_are_called_by_their_names():
    text = str(report(kept("a")).since(report(record("a", precision="fp8"))))
    assert text.splitlines()[0] == "1 layer fell back from FP8"
    assert "matmul FLOPs in FP8: 100.0% → 0.0%" in text
