"""Numeric comparison of two answers, and what a shadow shows of it."""

import json
from pathlib import Path

import numpy as np
import pytest

from oriel_gateway.admin.console.live import Source
from oriel_gateway.shared import agreement
from oriel_gateway.shared.agreement import MOST_BYTES, RATE, WINDOW, Agreement, Body, Compared, Latest, compared
from oriel_wire.v2.http import encode_response
from oriel_wire.v2.messages import InferRequest, InferResponse, RequestedOutput, tensor

from ..waiting import until
from .special_routes import SHADOWED, House, answering, ask, house, metric, ok

Rows = list[list[float]]


def answer(rows: Rows, *, name: str = "p", version: str = "1", datatype: str = "FP32") -> bytes:
    flat = [value for row in rows for value in row]
    output = {"name": name, "datatype": datatype, "shape": [len(rows), len(rows[0])], "data": flat}
    return json.dumps({"model_name": "digits", "model_version": version, "outputs": [output]}).encode()


def binary(rows: Rows) -> tuple[bytes, str]:
    response = InferResponse(model_name="digits", outputs=[tensor("p", np.asarray(rows, np.float32))])
    request = InferRequest(model_name="digits", outputs=[RequestedOutput("p", binary=True)])
    parts, length = encode_response(response, request)
    return b"".join(bytes(part) for part in parts), str(length)


def test_equal_outputs_agree_whatever_the_version_and_the_form() -> None:
    rows = [[0.1, 0.9], [0.7, 0.3]]
    body, length = binary(rows)
    assert compared(answer(rows), "", answer(rows, version="2"), "") == Compared(True, 1.0, 1.0, 0.0)
    found = compared(answer(rows), "", body, length)
    assert found is not None and found.agrees and found.rows == 1.0


def test_the_share_of_equal_classes_and_the_largest_error_are_those_of_the_rows() -> None:
    found = compared(answer([[0.1, 0.9], [0.4, 0.6]]), "", answer([[0.1, 0.9], [0.75, 0.25]]), "")
    assert found is not None and not found.agrees
    assert (found.rows, found.elements) == (0.5, 0.5) and found.error == pytest.approx(0.35)


def test_outputs_without_classes_are_compared_by_their_elements() -> None:
    found = compared(answer([[1.0], [2.0]]), "", answer([[1.0], [2.5]]), "")
    assert found is not None and found.rows is None and found.elements == 0.5


@pytest.mark.parametrize(
    "other", [answer([[0.1, 0.9]], name="q"), answer([[0.1, 0.9]] * 2), answer([[1, 0]], datatype="INT64")]
)
def test_other_names_shapes_or_types_agree_in_nothing(other: bytes) -> None:
    assert compared(answer([[0.1, 0.9]]), "", other, "") == Compared(False, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("body", "length"), [(b"ok", ""), (b"", ""), (b"{", ""), (b"{}", "99"), (b"{}", "x"), (b"[" * 1000, "")]
)
def test_what_is_no_answer_of_a_model_is_not_compared(body: bytes, length: str) -> None:
    assert compared(answer([[0.1, 0.9]]), "", body, length) is None
    assert compared(body, length, answer([[0.1, 0.9]]), "") is None


def test_a_large_or_compressed_answer_is_not_compared() -> None:
    small, large, packed = Body([]), Body([]), Body([b"HTTP/1.1 200 OK", b"Content-Encoding: gzip"])
    for body in (small, packed):
        body.feed(b"x" * MOST_BYTES)
    for _ in range(2):
        large.feed(b"x" * (MOST_BYTES // 2 + 1))
    assert (small.whole(), large.whole(), packed.whole()) == (b"x" * MOST_BYTES, None, None)
    assert Body([b"HTTP/1.1 200 OK", b"Inference-Header-Content-Length: 17"]).header_length == "17"


def body_of(data: bytes) -> Body:
    found = Body([])
    found.feed(data)
    return found


async def test_no_more_than_so_many_pairs_a_second_are_compared() -> None:
    now, found = 5.0, []
    compare = Agreement(clock=lambda: now)
    for _ in range(2 * RATE):
        compare.compare(("m", "p"), body_of(answer([[1, 0]])), body_of(answer([[1, 0]])), found.append)
        await until(lambda: not compare._under_way)
    assert len(found) == RATE
    now = 6.0
    compare.compare(("m", "p"), body_of(answer([[1, 0]])), body_of(answer([[1, 0]])), found.append)
    await until(lambda: len(found) == RATE + 1)


async def test_the_latest_pairs_count_and_their_names_are_bounded() -> None:
    latest = Latest()
    for number in range(WINDOW + 100):
        latest.add(Compared(number >= 100, 0.0 if number < 100 else 1.0, 1.0, 9.0 if number < 100 else 0.5))
    latest.add(None)
    assert (latest.ratio, latest.error) == (1.0, 0.5)
    assert latest.counts == {"agrees": WINDOW, "differs": 100, "not_comparable": 1}
    compare = Agreement(clock=iter(range(10_000)).__next__)
    compare.latest.update({(str(number), "p"): Latest() for number in range(agreement.MAX_PAIRS)})
    found: list[Compared] = []
    compare.compare(("new", "p"), body_of(answer([[1, 0]])), body_of(answer([[1, 0]])), found.append)
    compare.compare(("0", "p"), body_of(answer([[1, 0]])), body_of(answer([[1, 0]])), found.append)
    await until(lambda: len(found) == 1)
    assert ("new", "p") not in compare.latest


def shown(it: House, name: str) -> dict[tuple[str, ...], float]:
    return metric(it.core, name)


@pytest.mark.parametrize(
    ("other", "ratio", "result"),
    [([[0.2, 0.8]], 1.0, "differs"), ([[0.8, 0.2]], 0.0, "differs"), ([[0.1, 0.9]], 1.0, "agrees")],
)
async def test_a_shadow_is_compared_by_values(other: Rows, ratio: float, result: str) -> None:
    async with house(SHADOWED) as it:
        it.ups[0].answer = answering(ok(answer([[0.1, 0.9]])))
        it.ups[1].answer = answering(ok(answer(other, version="2")))
        assert (await ask(it.port)).status == 200
        await until(lambda: bool(it.core.routing.agreement.latest))
        assert shown(it, "oriel_model_agreement_ratio") == {("digits", "p1"): ratio}
        assert shown(it, "oriel_model_compared_total")[("digits", "p1", result)] >= 1.0
        error = abs(other[0][0] - 0.1)
        source = Source(it.core)
        source.snapshot()
        assert (await ask(it.port)).status == 200
        (row,) = json.loads(source.snapshot())["targets"]
        assert row["agrees"] == ratio
        assert shown(it, "oriel_model_largest_error")[("digits", "p1")] == pytest.approx(error, abs=1e-6)
        await until(it.idle)


async def test_answers_of_other_calls_and_refusals_are_not_compared() -> None:
    async with house(SHADOWED) as it:
        data = ok(answer([[0.1, 0.9]]))
        for up in it.ups:
            up.answer = answering(data)
        assert (await ask(it.port, "/v2/models/digits/generate")).status == 200
        it.ups[1].answer = answering(ok(answer([[0.1, 0.9]]), status="400 Bad"))
        assert (await ask(it.port)).status == 200
        await until(it.idle)
        assert it.core.routing.agreement.latest == {}


def test_the_bounds_are_those_of_the_page() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "prediction-quality.md").read_text()
    assert MOST_BYTES == 64 * 1024 and "up to 64 KiB" in page
    assert f"at most {RATE} pairs a second" in page.replace("\n", " ") and f"{WINDOW:,} pairs" in page


async def test_an_error_of_a_comparison_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Compared:
        raise RuntimeError("no")

    monkeypatch.setattr(agreement, "compared", broken)
    compare = Agreement(clock=iter(range(10_000)).__next__)
    for _ in range(10):
        compare.compare(("m", "p"), body_of(b"x"), body_of(b"x"), lambda _: None)
        await until(lambda: not compare._under_way)
    assert compare.latest == {}
