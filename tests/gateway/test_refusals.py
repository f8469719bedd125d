"""What errors of other servers say: surely not executed, not here, or nothing of that kind."""

import grpc
import pytest
from grpc import aio

from oriel_gateway.grpc_errors import what_it_says as over_grpc
from oriel_gateway.refusals import Said, what_it_says
from oriel_wire.h1_response import ResponseMemo, parse_response_head

FULL = "Exceeds maximum queue size"
STOPS = "Server is stopping, scheduler for model has stopped accepting new inference requests"
WORDS = [
    (503, FULL, Said.REFUSED),
    (503, f"[request id: <id_unknown>] {FULL}", Said.REFUSED),
    (503, f"[request id: 7] {STOPS}", Said.REFUSED),
    (503, f"in ensemble 'e', [request id: 7] {FULL}", Said.ANSWER),  # steps before it may have run
    (503, f"the tokenizer says: {FULL}", Said.ANSWER),
    (503, "Request timeout expired", Said.ANSWER),
    (503, "Request for unknown model: 'm' version 1 is not at ready state", Said.ABSENT),
    (503, "Model with name m is not ready.", Said.ABSENT),  # KServe
    (404, "Request for unknown model: 'm' is not found", Said.ABSENT),
    (404, "Model m not found", Said.ABSENT),  # MLServer
    (404, "Model m with version 3 not found", Said.ABSENT),
    (404, "Model with requested name is not found", Said.ABSENT),  # OVMS
    (404, "Model with name m does not exist.", Said.ABSENT),
    (404, "there is no such user", Said.PERHAPS_ABSENT),
]


def http(status: int, body: bytes, lines: str = "", *, model: bool = True) -> Said:
    return what_it_says(parse_response_head(f"HTTP/1.1 {status} No{lines}".encode(), ResponseMemo()), body, model=model)


def status(code: grpc.StatusCode, words: str, *metadata: tuple[str, str]) -> aio.AioRpcError:
    return aio.AioRpcError(code, aio.Metadata(), aio.Metadata(*metadata), words, None)


@pytest.mark.parametrize(("number", "words", "said"), WORDS, ids=[words[:50] for _, words, _ in WORDS])
def test_words_mean_the_same_over_both_protocols(number: int, words: str, said: Said) -> None:
    assert http(number, b'{"error":"%s"}' % words.encode()) is said
    code = grpc.StatusCode.NOT_FOUND if number == 404 else grpc.StatusCode.UNAVAILABLE
    assert over_grpc(status(code, words), model=True) is said


@pytest.mark.parametrize("number", [200, 401, 403, 409, 429, 500, 502, 504])
def test_other_statuses_say_nothing_of_that_kind(number: int) -> None:
    assert http(number, b'{"error":"%s"}' % FULL.encode()) is Said.ANSWER


def test_our_own_reasons_decide_alone() -> None:
    for reason, said in (
        ("queue_full", Said.REFUSED),
        ("model_not_ready", Said.ABSENT),
        ("queue_timeout", Said.ANSWER),
        ("backend_failed", Said.ANSWER),
    ):
        words = "Exceeds maximum queue size"
        assert http(503, b'{"error":"%s","reason":"%s"}' % (words.encode(), reason.encode())) is said
        metadata = ("x-oriel-reason", reason)
        assert over_grpc(status(grpc.StatusCode.UNAVAILABLE, words, metadata), model=True) is said
    # A Python model that says NOT_FOUND has run.
    assert http(404, b'{"error":"Model m not found","reason":"model_says_not_found"}') is Said.ANSWER
    said_so = status(grpc.StatusCode.NOT_FOUND, "Model m not found", ("x-oriel-reason", "model_says_not_found"))
    assert over_grpc(said_so, model=True) is Said.ANSWER


def test_without_a_model_nothing_is_absent() -> None:
    assert http(404, b'{"error":"Model m not found"}', model=False) is Said.ANSWER
    assert over_grpc(status(grpc.StatusCode.NOT_FOUND, "Model m not found"), model=False) is Said.ANSWER


def test_a_refusal_after_the_model_has_run_is_an_answer() -> None:
    assert http(503, b'{"error":"%s"}' % FULL.encode(), "\r\nx-oriel-cost-us: 9") is Said.ANSWER
