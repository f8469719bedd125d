"""Reads `/metrics` as a scraper does, with the parsers of Prometheus' client library."""

from typing import Any

import httpx
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from oriel_inference.app import Unit

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


async def scrape(unit: Unit, accept: str = "") -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        headers = {"accept": accept} if accept else None
        return await client.get(f"http://127.0.0.1:{unit.metrics_port}/metrics", headers=headers)


async def families(unit: Unit, *, openmetrics: bool = False) -> dict[str, Any]:
    response = await scrape(unit, "application/openmetrics-text" if openmetrics else "")
    parsed = list((parse_openmetrics if openmetrics else parse_text)(response.text))
    assert len({family.name for family in parsed}) == len(parsed), "a family is written once"
    return {family.name: family for family in parsed}


class Read:
    """The samples of one scrape by name and labels. The text parser adds `_total` to names of counters without it."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.samples: Samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in found.values()
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        return self.samples[name, frozenset(labels.items())]

    def where(self, name: str, **labels: str) -> dict[frozenset[tuple[str, str]], float]:
        """Return the samples of a name that have at least these labels."""
        wanted = set(labels.items())
        return {found: value for (sample, found), value in self.samples.items() if sample == name and wanted <= found}


async def read(unit: Unit) -> Read:
    return Read(await families(unit, openmetrics=True))
