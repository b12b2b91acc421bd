"""JSON: what is written is read back, a fault is one error with its place, the schema says the same."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from made_reports import kept, report, whole_report

from mxcompile.errors import OptionError
from mxcompile.formats import PRECISIONS, Choices, Rounding
from mxcompile.policy import Gemm
from mxcompile.report import STORED, Report
from mxcompile.report.data import schema
from mxcompile.report.data.record import Part
from mxcompile.report.data.schema import CHOICES, SCHEMA_FILE, json_schema

REPORTS = [whole_report(), report(kept()), Report.from_parts([], target="", policy="")]
jsonschema = pytest.importorskip("jsonschema")
VALIDATOR = jsonschema.Draft202012Validator(json.loads(SCHEMA_FILE.read_text(encoding="utf-8")))


def as_json() -> dict[str, Any]:
    data = json.loads(whole_report().to_json())
    assert isinstance(data, dict)
    return data


@pytest.mark.parametrize("original", REPORTS)
def test_report_read_from_json_equals_the_written(original: Report):
    restored = Report.from_json(original.to_json())
    assert restored == original
    assert hash(restored) == hash(original)


def test_json_carries_its_schema():
    data = as_json()
    assert (data["schema"], data["kind"]) == (1, "report")
    assert set(data) == {"schema", "kind", "gemms", "summary", "graph"}
    assert data["gemms"][0]["formats"][0] == {
        "operand": "x", "elem": "e4m3", "block": "1x32", "rounding": "rceil",
        "elements": "nearest", "amax": "max", "scales": "", "transform": "",
    }  # fmt: skip


def test_the_published_schema_is_that_of_the_classes():
    """``mxcompile.report.data.schema.publish()`` writes it anew."""
    assert json.loads(SCHEMA_FILE.read_text(encoding="utf-8")) == json_schema()


def test_the_words_are_those_of_policies():
    assert set(CHOICES["GemmRecord", "gemm"]) == set(Gemm)
    assert set(CHOICES["GemmRecord", "precision"]) == set(PRECISIONS)
    derivations = {*map(str, Rounding), "nearest", "pow2", "two-level", STORED}
    assert set(CHOICES["OperandFormat", "rounding"]) == derivations
    rows = [row for row in PRECISIONS.values() if row.quantizes]
    blocks = {None, *(tile for row in rows for tile in row.weight_blocks)}
    operand_formats = [
        row.formats(Choices(elem_dtype=elem, block=word, scaling=word, weight_block=block))
        for row in rows
        for elem in row.elems
        for word in row.tiles
        for block in blocks
    ]
    formats = [fmt for operands in operand_formats for fmt in (operands.x, operands.w, operands.dy)]
    assert set(CHOICES["OperandFormat", "block"]) == {str(fmt.tile) for fmt in formats}
    assert set(CHOICES["OperandFormat", "elem"]) == {fmt.elem.name for fmt in formats}
    assert {fmt.derivation for fmt in formats} <= set(CHOICES["OperandFormat", "rounding"])


def test_the_published_schema_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(VALIDATOR.schema)


@pytest.mark.parametrize("original", REPORTS)
def test_written_report_validates_against_the_schema(original: Report):
    VALIDATOR.validate(json.loads(original.to_json()))


BROKEN: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "version": (
        ("schema",), 2, "$.schema: 2 is not 1, which this mxcompile reads; a newer mxcompile wrote it",
    ),
    "no version": (("schema",), None, "$.schema: None is not 1"),
    "version of another type": (("schema",), "1", "$.schema: '1' is not 1"),
    "gemms no array": (("gemms",), 5, "$.gemms: expected an array, found 5"),
    "record no object": (("gemms", 0), "x", "$.gemms[0]: expected an object, found 'x'"),
    "record empty": (("gemms", 1), {}, "$.gemms[1]: key 'name' is missing"),
    "name a number": (("gemms", 2, "name"), 7, "$.gemms[2].name: expected a string, found 7"),
    "size a string": (("gemms", 0, "m"), "64", "$.gemms[0].m: expected a whole number, found '64'"),
    "size a fraction": (("gemms", 0, "m"), 1.5, "$.gemms[0].m: expected a whole number, found 1.5"),
    "size true": (("gemms", 0, "m"), True, "$.gemms[0].m: expected a whole number, found True"),
    "size negative": (("gemms", 0, "k"), -1, "$.gemms[0].k: expected a whole number from 0 to"),
    "gemm unknown": (("gemms", 0, "gemm"), "fprob", "$.gemms[0].gemm: unknown word 'fprob' (did you mean"),
    "precision unknown": (("gemms", 0, "precision"), "fp4", "$.gemms[0].precision: unknown word 'fp4'"),
    "elem unknown": (("gemms", 0, "formats", 1, "elem"), "e3m4", "$.gemms[0].formats[1].elem: unknown word"),
    "formats null": (("gemms", 0, "formats"), None, "$.gemms[0].formats: expected an array, found null"),
    "kind unknown": (("kind",), "chart", "$.kind: unknown word 'chart'; allowed: report, audit"),
    "another kind": (("kind",), "audit", "$.kind: this is an mxcompile audit, where an mxcompile report was"),
    "summary an array": (("summary",), [], "$.summary: expected an object, found an array"),
    "share a word": (("summary", "flop_share"), "all", "$.summary.flop_share: expected a number, found"),
    "warning a number": (("summary", "warnings", 1), 3, "$.summary.warnings[1]: expected a string, found 3"),
    "edge of three": (("graph", 0, "edges", 0), [0, 1, 2], "$.graph[0].edges[0]: expected 2 items, found 3"),
    "size beyond numbers": (("gemms", 0, "m"), 10**400, "$.gemms[0].m: expected a whole number from 0 to"),
    "node kind": (("graph", 0, "nodes", 0, "kind"), "cost", "$.graph[0].nodes[0].kind: unknown word 'cost'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_fault_is_one_error_with_its_place(case: str, tmp_path: Path):
    path, value, message = BROKEN[case]
    data = as_json()
    inside = data
    for step in path[:-1]:
        inside = inside[step]
    inside[path[-1]] = copy.deepcopy(value)
    assert not VALIDATOR.is_valid(data)
    file = tmp_path / "report.json"
    file.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(OptionError) as caught:
        Report.load(file)
    assert message in str(caught.value)
    assert repr(str(file)) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_keys_of_later_versions_are_passed_over():
    data = as_json()
    for level in (data, data["summary"], data["gemms"][0], data["gemms"][0]["formats"][0], data["graph"][0]):
        level["of_a_later_version"] = {"deep": [1, None]}
    VALIDATOR.validate(data)
    assert Report.from_json(json.dumps(data)) == whole_report()


def test_report_file_without_kind_is_still_read():
    data = as_json()
    del data["kind"]
    assert Report.from_json(json.dumps(data)) == whole_report()


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("edges", [[0, 5]], "$.graph[0].edges[0]: node 5 is not among the 5"),
        (
            "nodes",
            [{"kind": "gemm", "phase": "forward", "names": [], "label": ""}],
            "$.graph[0].nodes[0].names: ",
        ),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_a_fault(part: str, value: Any, message: str):
    data = as_json()
    data["graph"][0] = {**data["graph"][0], "edges": [], part: value}
    with pytest.raises(OptionError, match=re.escape(message)):
        Report.from_json(json.dumps(data))


@pytest.mark.parametrize("path", ["schema", "gemms", "summary"])
def test_json_without_a_required_key_raises(path: str):
    data = as_json()
    del data[path]
    assert not VALIDATOR.is_valid(data)
    with pytest.raises(OptionError, match=re.escape(repr(path))):
        Report.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("", "not JSON: Expecting value: line 1"),
        ("{", "not JSON"),
        ("[]", "no key 'schema'"),
        ("null", "no key 'schema'"),
        ("[" * 100_000, "nested too deeply"),
        ('{"schema": 1, "schema": 1}', "the key 'schema' twice"),
        ('{"schema": NaN}', "NaN is not a JSON number"),
        (
            '{"schema": 1, "gemms": [], "summary": {"pass_time_us": 1e999}}',
            "$.summary.pass_time_us: expected",
        ),
        (f'{{"schema": 1, "gemms": [], "summary": {{"graphs": {"9" * 5000}}}}}', "not JSON"),
    ],
)
def test_text_that_is_not_a_report_raises(text: str, piece: str):
    with pytest.raises(OptionError, match=re.escape(piece)):
        Report.from_json(text)


def test_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(OptionError, match=r"none\.json' cannot be read: No such file"):
        Report.load(tmp_path / "none.json")
    with pytest.raises(OptionError, match="cannot be read: Is a directory"):
        Report.load(tmp_path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match="is not UTF-8"):
        Report.load(tmp_path / "binary.json")


def test_json_with_a_byte_order_mark_loads(tmp_path: Path):
    (tmp_path / "bom.json").write_text(whole_report().to_json(), encoding="utf-8-sig")
    assert Report.load(tmp_path / "bom.json") == whole_report()


def test_json_arrays_are_checked_item_by_item():
    twins = ("h.1", (1, 12)), ("h.2", None)
    part = Part(weights=(("fc.weight", 4096, 2, 1),), twins=twins, histories=((3, 16),))
    data = json.loads(json.dumps(dataclasses.asdict(part)))
    assert schema.read(Part, data) == part
    data["weights"][0][1] = "4096"
    with pytest.raises(ValueError, match=r"weights\[0\]\[1\]: expected a whole number, found '4096'"):
        schema.read(Part, data)
    data["weights"] = [["fc.weight", 4096]]
    with pytest.raises(ValueError, match=r"weights\[0\]: expected 4 items, found 2"):
        schema.read(Part, data)
