"""Load reports as header values."""

import pytest

from oriel_wire.observe.orca import encode_report, report_form


def test_both_forms_are_written_as_triton_and_envoy_read_them() -> None:
    named = {"queue_depth": 12.0, "custom_util": 0.4}
    assert encode_report(named, "TEXT") == "TEXT named_metrics.queue_depth=12.0, named_metrics.custom_util=0.4"
    assert encode_report(named, "JSON") == 'JSON {"named_metrics":{"queue_depth":12.0,"custom_util":0.4}}'


@pytest.mark.parametrize(("wanted", "form"), [("text", "TEXT"), ("HTTP", "TEXT"), (" JSON ", "JSON"), ("bin", "")])
def test_forms_are_asked_for_by_name(wanted: str, form: str) -> None:
    assert report_form(wanted) == form


@pytest.mark.parametrize("named", [{"a b": 1.0}, {"a": float("inf")}, {f"m{n}": 1.0 for n in range(65)}])
def test_metrics_that_no_form_can_carry_are_not_written(named: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        encode_report(named, "TEXT")
