from typing import Any

import pytest

from oriel_cli.watch.waterfall import WIDTH, draw


def span(name: str, number: str, parent: str, start_ms: float, end_ms: float, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "unit": name.partition(".")[0],
        "span_id": number,
        "parent_id": parent,
        "start_ns": int(start_ms * 1e6),
        "end_ns": int(end_ms * 1e6),
        "error": "",
        "attributes": {},
        **more,
    }


TRACE = [
    span("gateway.request", "1", "client", 0, 20, attributes={"oriel.tier": "gold", "oriel.tenant": "acme"}),
    span("gateway.queue", "2", "1", 0, 2),
    span("gateway.forward", "3", "1", 2, 20),
    span("logic.request", "4", "3", 3, 19, attributes={"oriel.request_id": "r"}),
    span("inference.compute", "6", "4", 9, 18, attributes={"oriel.batch_rows": 4}, error="the model failed"),
]


def test_a_trace_is_an_indented_picture() -> None:
    assert draw("r", "ab" * 16, TRACE, ascii_only=True) == [
        "request r",
        "trace abababababababababababababababab   20.00 ms   tier gold   tenant acme",
        "",
        "span                               unit        start ms        ms",
        "gateway.request                    gateway         0.00     20.00 ##################################",
        "  gateway.queue                    gateway         0.00      2.00 ###",
        "  gateway.forward                  gateway         2.00     18.00    ###############################",
        "    logic.request                  logic           3.00     16.00      ###########################",
        "      inference.compute            inference       9.00      9.00                ###############",
        "        error: the model failed  batch_rows=4",
    ]


def test_no_line_is_wider_than_a_terminal_or_carries_control_characters() -> None:
    wild = [
        span("n" * 300, "1", "", 0, 1e9, unit="u" * 300, error="e\n\x1b[31m" * 100, attributes={"k" * 99: "v" * 999}),
        *(span("deep", str(number + 1), str(number), 0, 0) for number in range(1, 60)),
    ]
    lines = draw("r\x1b" * 200, "t", wild)
    assert max(map(len, lines)) <= WIDTH
    assert all(line.isprintable() for line in lines)
    assert len(lines) == 4 + 60 + 1


@pytest.mark.parametrize("parents", [("2", "1"), ("1", "2")])
def test_spans_whose_parents_form_a_ring_or_are_themselves_end(parents: tuple[str, str]) -> None:
    draw("r", "t", [span("a", "1", parents[0], 0, 1), span("b", "2", parents[1], 0, 1)])


def test_a_trace_without_duration_is_drawn() -> None:
    assert draw("r", "t", [span("a", "1", "", 5, 5)])[-1].split() == ["a", "a", "0.00", "0.00"]
