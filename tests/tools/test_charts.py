"""The charts of pages, in a browser without a network."""

from pathlib import Path

import pytest
from browser import CHROMIUM, opened

from oriel_tools.load.chart import Line, Span, chart, script, style

OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND"


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_every_chart_of_a_page_is_drawn_and_nothing_is_fetched(tmp_path: Path) -> None:
    lines = [
        Line(label="a </script> b", values=[5.0, None, 50.0], colour="#0072b2"),
        Line(label="target", values=[20.0], colour="#d55e00", dash=(8, 5)),
    ]
    spans = [Span(label="calm", start_s=0.0, end_s=3.0), Span(label="storm", start_s=3.0, end_s=6.0, style="lag")]
    charts = [
        chart("latency", "ms", 2.0, lines, spans, logarithmic=True),
        chart("share", "%", 2.0, lines[:1], spans),
        chart("nothing came", "/s", 2.0, [Line(label="a", values=[None], colour="red")], []),
    ]
    page_file = tmp_path / "page.html"
    page_file.write_text(
        f"<!doctype html><style>{style()}</style>{''.join(charts)}<script>{script()}</script>", encoding="utf-8"
    )
    with opened(tmp_path / "profile", OFFLINE) as page:
        page.open(page_file.as_uri())
        assert page.run("document.querySelectorAll('.chart canvas').length") == 3
        labels = page.run("[...document.querySelectorAll('.u-label')].map(each => each.textContent)")
        assert labels[:3] == ["s", "a </script> b", "target"]
        assert page.run("[...document.querySelectorAll('canvas')].every(each => each.width > 0)")
        assert page.requested == [page_file.as_uri()] and page.complaints == []
