"""Load reports as header values: what is written is read back, whatever is read ends in a report or BadMessage."""

import json
from math import isfinite

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_wire.errors import BadMessage
from oriel_wire.observe.orca import LoadReport, encode_report, parse_report, report_form

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.:/-]{0,30}", fullmatch=True, alphabet=st.characters(codec="ascii"))
VALUES = st.floats(allow_nan=False, allow_infinity=False)
REPORTS = st.builds(
    LoadReport,
    load=st.dictionaries(
        st.sampled_from(["application_utilization", "cpu_utilization", "mem_utilization", "rps_fractional", "eps"]),
        st.floats(min_value=0.0, allow_infinity=False),
    ),
    named=st.dictionaries(NAMES, VALUES, max_size=20),
)


@given(REPORTS, st.sampled_from(["TEXT", "JSON"]))
def test_what_is_written_is_read_back(report: LoadReport, form: str) -> None:
    value = encode_report(report, form)
    assert value.isascii() and value.isprintable()
    assert parse_report(value) == report


@given(st.one_of(st.text(), st.text().map("TEXT {}".format), st.text().map("JSON {}".format), st.binary().map(repr)))
def test_any_text_is_a_report_or_refused(value: str) -> None:
    try:
        report = parse_report(value)
    except BadMessage:
        return
    assert all(isfinite(each) for each in (*report.load.values(), *report.named.values()))
    assert all(each >= 0.0 for each in report.load.values())


@settings(max_examples=40)
@given(st.recursive(st.none() | st.booleans() | VALUES | st.text(), lambda e: st.dictionaries(st.text(), e)))
def test_any_json_is_a_report_or_refused(document: object) -> None:
    try:
        parse_report("JSON " + json.dumps(document)[:4000])
    except BadMessage:
        pass


def test_the_forms_are_those_of_others() -> None:
    """Lines as Triton's and Envoy's documentation show them."""
    text = "TEXT cpu_utilization=0.3, mem_utilization=0.8, rps_fractional=10.0, eps=1, named_metrics.custom_util=0.4"
    tight = text.replace(", ", ",")
    document = (
        'JSON {"cpu_utilization": 0.3, "mem_utilization": 0.8, "rps_fractional": 10.0, "eps": 1, '
        '"named_metrics": {"custom_util": 0.4}}'
    )
    expected = LoadReport(
        load={"cpu_utilization": 0.3, "mem_utilization": 0.8, "rps_fractional": 10.0, "eps": 1.0},
        named={"custom_util": 0.4},
    )
    assert parse_report(text) == parse_report(tight) == parse_report(document) == expected
    assert parse_report("TEXT utilization.gpu=0.5, rps=3").load == {}, "fields that are not known are passed over"


@pytest.mark.parametrize(("wanted", "form"), [("text", "TEXT"), ("HTTP", "TEXT"), (" JSON ", "JSON"), ("bin", "")])
def test_forms_are_asked_for_by_name(wanted: str, form: str) -> None:
    assert report_form(wanted) == form


@pytest.mark.parametrize(
    "value",
    [
        "",
        "BIN AAAA",
        "TEXT a",
        "TEXT a=nan",
        "TEXT a=1_0",
        "TEXT a=1e999",
        "TEXT cpu_utilization=-1",
        "TEXT named_metrics.a=1, named_metrics.a=2",
        "TEXT named_metrics.=1",
        "TEXT " + ", ".join(f"named_metrics.m{n}=1" for n in range(65)),
        "TEXT named_metrics.a=1" + " " * 5000,
        'JSON {"eps": true}',
        'JSON {"named_metrics": {"a": "1"}}',
        'JSON {"eps": 1' + "0" * 400 + "}",
        "JSON []",
        'JSON {"a":' * 200,
    ],
)
def test_what_is_malformed_is_refused(value: str) -> None:
    with pytest.raises(BadMessage):
        parse_report(value)


@pytest.mark.parametrize(
    "report",
    [
        LoadReport(named={"a b": 1.0}),
        LoadReport(named={"a": float("inf")}),
        LoadReport(named={f"m{n}": 1.0 for n in range(65)}),
    ],
)
def test_what_no_form_can_carry_is_not_written(report: LoadReport) -> None:
    with pytest.raises(ValueError):
        encode_report(report, "TEXT")
