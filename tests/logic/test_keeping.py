"""Which servers a logic server asks for the spans of a trace that a gateway keeps."""

from types import SimpleNamespace
from typing import cast

from oriel_logic.observe.stages import HopFacts, Ledger
from oriel_logic.server.ingress import Keeping
from oriel_logic.server.visit import Visit
from oriel_wire.observe.recall import Recaller
from oriel_wire.observe.trace import ListSink, new_trace


class Asked:
    """A recaller that only remembers whom it is to ask."""

    def __init__(self) -> None:
        self.servers: list[tuple[str, int, bool]] = []

    def ask(self, host: str, port: int, trace: str, *, grpc: bool = False) -> None:
        self.servers.append((host, port, grpc))


def test_models_are_asked_at_the_address_that_was_called_in_its_protocol() -> None:
    """Those that were called over gRPC were not asked."""
    ledger = Ledger(new_trace(False))
    hops = [
        HopFacts("m1", 8000, "POST", "/v2/models/digits/infer", 200),
        HopFacts("m1", 8000, "POST", "/v2/models/digits/infer", 200),
        HopFacts("m2", 8001, "inference.GRPCInferenceService/ModelStreamInfer", "", 0),
        None,
    ]
    for hop in hops:
        ledger.stage("infer", kind="client").hop = hop
    asked = Asked()
    visit = cast(Visit, SimpleNamespace(ledger=ledger))
    Keeping(ListSink(), cast(Recaller, asked))._pass_on([(7, None, (visit,), 0)])
    assert sorted(asked.servers) == [("m1", 8000, False), ("m2", 8001, True)]
