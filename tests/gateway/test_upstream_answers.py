"""Errors of other servers: which say that nothing was executed, or that the model is absent, and which say neither."""

import grpc
import pytest

from oriel_gateway.pools.grpc_answers import GrpcAnswer
from oriel_gateway.pools.upstream_answers import AnswerKind, classify_answer
from oriel_wire.h1.response import ResponseMemo, parse_response_head

FULL = "Exceeds maximum queue size"
STOPS = "Server is stopping, scheduler for model has stopped accepting new inference requests"
WORDS = [
    (503, FULL, AnswerKind.REFUSED),
    (503, f"[request id: <id_unknown>] {FULL}", AnswerKind.REFUSED),
    (503, f"[request id: 7] {STOPS}", AnswerKind.REFUSED),
    # the step before the failing one may have run
    (503, f"in ensemble 'e', [request id: 7] {FULL}", AnswerKind.ANSWER),
    (503, f"the tokenizer says: {FULL}", AnswerKind.ANSWER),
    (503, "Request timeout expired", AnswerKind.ANSWER),
    (503, "Request for unknown model: 'm' version 1 is not at ready state", AnswerKind.ABSENT),
    (503, "Model with name m is not ready.", AnswerKind.ABSENT),  # KServe
    (404, "Request for unknown model: 'm' is not found", AnswerKind.ABSENT),
    (404, "Model m not found", AnswerKind.ABSENT),  # MLServer
    (404, "Model m with version 3 not found", AnswerKind.ABSENT),
    (404, "Model with requested name is not found", AnswerKind.ABSENT),  # OVMS
    (404, "Model with name m does not exist.", AnswerKind.ABSENT),
    (404, "there is no such user", AnswerKind.PERHAPS_ABSENT),
]


def http(status: int, body: bytes, lines: str = "", *, model: bool = True) -> AnswerKind:
    return classify_answer(
        parse_response_head(f"HTTP/1.1 {status} No{lines}".encode(), ResponseMemo()), body, model=model
    )


def status(code: grpc.StatusCode, words: str, *metadata: tuple[str, str]) -> GrpcAnswer:
    number: int = code.value[0]
    trailers = [(b"grpc-status", b"%d" % number), (b"grpc-message", words.encode())]
    return GrpcAnswer([], [*trailers, *[(name.encode(), value.encode()) for name, value in metadata]])


def over_grpc(answer: GrpcAnswer, *, model: bool) -> AnswerKind:
    return answer.kind(model=model)


@pytest.mark.parametrize(("number", "words", "said"), WORDS, ids=[words[:50] for _, words, _ in WORDS])
def test_words_mean_the_same_over_both_protocols(number: int, words: str, said: AnswerKind) -> None:
    assert http(number, b'{"error":"%s"}' % words.encode()) is said
    code = grpc.StatusCode.NOT_FOUND if number == 404 else grpc.StatusCode.UNAVAILABLE
    assert over_grpc(status(code, words), model=True) is said


@pytest.mark.parametrize("number", [200, 401, 403, 409, 429, 500, 502, 504])
def test_other_statuses_say_nothing_of_that_kind(number: int) -> None:
    assert http(number, b'{"error":"%s"}' % FULL.encode()) is AnswerKind.ANSWER


def test_our_own_reasons_decide_alone() -> None:
    for reason, said in (
        ("queue_full", AnswerKind.REFUSED),
        ("model_not_ready", AnswerKind.ABSENT),
        ("model_memory_full", AnswerKind.NO_MEMORY),
        ("queue_timeout", AnswerKind.ANSWER),
        ("backend_failed", AnswerKind.ANSWER),
    ):
        words = "Exceeds maximum queue size"
        assert http(503, b'{"error":"%s","reason":"%s"}' % (words.encode(), reason.encode())) is said
        metadata = ("x-oriel-reason", reason)
        assert over_grpc(status(grpc.StatusCode.UNAVAILABLE, words, metadata), model=True) is said
    # A Python model that reports NOT_FOUND has run.
    assert http(404, b'{"error":"Model m not found","reason":"model_says_not_found"}') is AnswerKind.ANSWER
    said_so = status(grpc.StatusCode.NOT_FOUND, "Model m not found", ("x-oriel-reason", "model_says_not_found"))
    assert over_grpc(said_so, model=True) is AnswerKind.ANSWER


def test_without_a_model_nothing_is_absent() -> None:
    assert http(404, b'{"error":"Model m not found"}', model=False) is AnswerKind.ANSWER
    assert http(503, b'{"reason":"model_memory_full"}', model=False) is AnswerKind.REFUSED
    assert over_grpc(status(grpc.StatusCode.NOT_FOUND, "Model m not found"), model=False) is AnswerKind.ANSWER


def test_a_refusal_after_the_model_has_run_is_an_answer() -> None:
    assert http(503, b'{"error":"%s"}' % FULL.encode(), "\r\nx-oriel-cost-us: 9") is AnswerKind.ANSWER
