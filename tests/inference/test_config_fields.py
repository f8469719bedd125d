"""Every field of `config.pbtxt` does what its row says, and docs/model-repository.md says the same."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor

from oriel_inference.backends import find_backend
from oriel_inference.errors import LoadFailed
from oriel_inference.repository.load import LoadedVersion, Loading, load_model
from oriel_inference.stores.local import LocalStore
from oriel_wire.v2.metadata import message_json
from oriel_wire.v2.proto import model_config_pb2 as pb

from .config_rows import REFUSED, ROWS, SHOWN, WARNED, WORKS, Row, write

DOCS = Path(__file__).parents[2] / "docs/model-repository.md"


# Judged by tests of their own; here only: the page has a line for them.
ELSEWHERE = (
    "ensemble_scheduling",
    "dynamic_batching",
    "sequence_batching",
    "batch_input",
    "batch_output",
    "input.allow_ragged_batch",
    "model_warmup",
    "metric_tags",
    "model_metrics",
)


@pytest.mark.usefixtures("without_engines")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.field}-{row.verdict}")
def test_field(row: Row, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, row)
    try:
        with caplog.at_level(logging.WARNING, "oriel_inference"):
            (version,) = load_model(
                Loading(LocalStore(tmp_path), "double", find_backend=find_backend, cores=1, models=1)
            ).values()
    except LoadFailed as failure:
        version = failure
    warnings = [record.getMessage() for record in caplog.records]
    if row.verdict == REFUSED:
        assert isinstance(version, LoadFailed), "it was loaded"
        assert row.text in version.reason and len(version.reason) <= 500 and str(tmp_path) not in version.reason
        assert version.reason.startswith(("double/", "file name")), "the file is not named"
        assert warnings in ([], [f"double/config.pbtxt: {row.field.partition('.graph_spec')[0]} has no effect here"])
        # Shown to clients all the same, if it could be read.
        if version.config is None:
            assert " column " in version.reason
        else:
            assert row.field.partition(".")[0] in {field.name for field, _ in version.config.ListFields()}
        return
    assert isinstance(version, LoadedVersion), version
    # Shown to clients as it was written, whatever it does.
    assert message_json(version.config)
    for top in {row.field.partition(".")[0]} - {""}:
        assert getattr(version.config, top) or top in ("version_policy",)
    if row.verdict == WARNED:
        assert len(warnings) == 1 and row.text in warnings[0] and warnings[0].startswith("double/config.pbtxt: ")
    else:
        assert warnings == []
    if row.effect is not None:
        assert row.effect(version)
    version.close()


def fields(message: Descriptor, path: str = "") -> Iterator[str]:
    """The leaves of the format."""
    for field in message.fields:
        name = f"{path}{field.name}"
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            inner = inner.fields_by_name["value"].message_type
        if inner is None or not inner.fields:
            yield name
        else:
            yield from fields(inner, f"{name}.")


def test_every_field_of_the_format_has_a_row() -> None:
    known = {row.field: row.verdict for row in ROWS}
    # A message that is refused as a whole needs no row for what is in it.
    refused = {field for field, verdict in known.items() if verdict == REFUSED}
    missing = [name for name in fields(pb.ModelConfig.DESCRIPTOR) if name not in known]
    missing = [name for name in missing if refused.isdisjoint(prefixes(name))]
    assert [name for name in missing if not name.startswith(ELSEWHERE)] == []


def test_the_page_says_what_the_rows_say() -> None:
    page = {}
    for line in DOCS.read_text().splitlines():
        if line.startswith("| `") and line.count("|") >= 4:
            _, names, verdict, *_ = (cell.strip() for cell in line.split("|"))
            for name in names.replace("`", "").split(", "):
                page[name] = verdict
    verdicts: dict[str, set[str]] = {}
    for row in ROWS:
        if row.field:
            verdicts.setdefault(row.field, set()).add(row.verdict)
    wrong = {}
    for name in fields(pb.ModelConfig.DESCRIPTOR):
        # A line for a whole message covers its fields.
        said = next((page[p] for p in prefixes(name) if p in page), None)
        if said is None:
            wrong[name] = "has no line"
        elif not name.startswith(ELSEWHERE):
            found = next(verdicts[each] for each in prefixes(name) if each in verdicts)
            expected = next((v for v in (WORKS, WARNED, SHOWN) if v in found), REFUSED)
            if said.split()[0].rstrip(",") != expected:
                wrong[name] = f"page: {said}, rows: {expected}"
    assert wrong == {}


def prefixes(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]
