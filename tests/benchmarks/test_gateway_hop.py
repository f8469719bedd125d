"""The traffic that the gateway's hop is measured with, and how its figures are judged."""

import re
import sys
from contextlib import ExitStack

import h11
import pytest
from gateway_bench.contenders import FILES
from gateway_bench.traffic import CLIENTS, HEADS, grpc_calls
from gateway_hop import LOADS, verdicts
from harness.processes import accepts, free_ports, serving


@pytest.mark.parametrize("client", CLIENTS)
def test_every_client_sends_a_head_that_another_parser_reads(client: str) -> None:
    values = {"host": "127.0.0.1:8080", "size": "4", "state": "tracestate: vendor=1\r\n", "address": "10.0.0.1"}
    head = re.sub("@([a-z]+)", lambda marked: values.get(marked[1], "0" * 16), client)
    server = h11.Connection(h11.SERVER)
    server.receive_data(f"POST /v2/models/digits/infer HTTP/1.1\r\n{head}\r\n".encode())
    request = server.next_event()
    assert isinstance(request, h11.Request)
    names = [name for name, _ in request.headers]
    assert len(names) == len(set(names)) and {b"x-request-id", b"content-length"} <= set(names)
    assert b"authorization" in names or b"x-api-key" in names


@pytest.mark.parametrize("repeated", [False, True])
def test_grpc_calls_reach_the_upstream_through_another_implementation(repeated: bool) -> None:
    """gRPC's C core keeps a table of header fields, the upstream does not: both forms of a head are read."""
    port, behind = free_ports(2)
    with ExitStack() as stack:
        for script, *ports in (("grpc_upstream.py", behind), ("naive_grpc.py", port, behind)):
            command = [sys.executable, str(FILES / str(script)), *map(str, ports)]
            stack.enter_context(serving(command, lambda ports=ports: accepts(int(ports[0]))))
        for each in (port, behind):
            run = grpc_calls(each, size=100_000, connections=2, streams=3, seconds=0, repeated=repeated)
            assert run.requests == 6 and run.p50_ms > 0.0


def test_each_build_is_held_to_its_own_bound() -> None:
    figures = {who: {"cpu_us": cpu_us} for who, cpu_us in (("oriel", 25.0), ("oriel compiled", 25.0), ("nginx", 10.0))}
    assert verdicts({"varying": figures}) == [
        ("oriel, varying: CPU <= 2.8 x nginx", "2.5 x", "met"),
        ("oriel compiled, varying: CPU <= 2 x nginx", "2.5 x", "missed"),
    ]
    assert {load.heads for load in LOADS.values()} == set(HEADS)
