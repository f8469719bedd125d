"""The bytes of a trace request, decoded by OpenTelemetry's own protobuf classes."""

import base64
import json
import math
from typing import Any

from google.protobuf import json_format
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OfficialSpan

from oriel_wire.observe.otlp import SCHEMA_URL, JsonEncoder, ProtobufEncoder, _remembered
from oriel_wire.observe.trace import Scalar, Span, TraceContext, wall_ns

KINDS = {"internal": 1, "server": 2, "client": 3}
texts = st.text(max_size=300) | st.text(st.characters(codec="ascii"), max_size=20)
scalars = st.one_of(
    texts,
    st.booleans(),
    st.integers(min_value=-(1 << 70), max_value=1 << 70),
    st.sampled_from([0, 1, -1, 127, 128, 1023, 1024, (1 << 63) - 1, 1 << 63, -(1 << 63), -(1 << 63) - 1]),
    st.floats(),
    st.sampled_from([0.0, -0.0, 1.0]),
)
attributes = st.dictionaries(texts | st.sampled_from(["a", "b"]), scalars, max_size=8)
contexts = st.builds(
    TraceContext,
    st.integers(1, (1 << 128) - 1),
    st.integers(1, (1 << 64) - 1),
    st.booleans(),
    st.sampled_from(["", "ot=th:fd70a3d70a3d7", "vendor=1,other=2"]),
    st.booleans(),
)
spans = st.builds(
    Span,
    name=texts,
    context=contexts,
    parent_id=st.just(0) | st.integers(1, (1 << 64) - 1),
    start_s=st.floats(0, 1e8),
    end_s=st.floats(0, 1e8),
    kind=st.sampled_from(sorted(KINDS)),
    attributes=attributes,
    failed=st.booleans(),
    error=texts,
)


def cleaned(text: str) -> str:
    """The text as UTF-8 can hold it."""
    return text.encode("utf-8", "replace").decode()


def value_of(value: AnyValue) -> Scalar:
    found: Scalar = getattr(value, value.WhichOneof("value"))
    return found


def same(found: Scalar, sent: Scalar) -> bool:
    if isinstance(sent, int) and not isinstance(sent, bool) and not -(1 << 63) <= sent < 1 << 63:
        return found == str(sent)  # no 64-bit number holds it
    if isinstance(sent, str):
        return found == cleaned(sent)
    if type(found) is not type(sent):
        return False
    if isinstance(sent, float) and math.isnan(sent):
        return isinstance(found, float) and math.isnan(found)
    return found == sent and math.copysign(1, found) == math.copysign(1, sent)


def check(found: OfficialSpan, sent: Span) -> None:
    assert found.trace_id == sent.context.trace_id.to_bytes(16, "big")
    assert found.span_id == sent.context.span_id.to_bytes(8, "big")
    assert found.parent_span_id == (sent.parent_id.to_bytes(8, "big") if sent.parent_id else b"")
    assert found.trace_state == sent.context.state
    assert (found.name, found.kind) == (cleaned(sent.name), KINDS[sent.kind])
    assert (found.start_time_unix_nano, found.end_time_unix_nano) == (wall_ns(sent.start_s), wall_ns(sent.end_s))
    assert found.flags & 0xFF == sent.context.sampled + 2 * sent.context.random
    assert found.flags & 0x100
    assert bool(found.flags & 0x200) == (sent.kind == "server" and sent.parent_id != 0)
    assert found.status.code == (2 if sent.failed else 0)
    assert found.status.message == (cleaned(sent.error) if sent.failed else "")
    pairs = [(pair.key, value_of(pair.value)) for pair in found.attributes]
    assert [key for key, _ in pairs] == [cleaned(key) for key in sent.attributes]
    assert all(same(value, sent) for (_, value), sent in zip(pairs, sent.attributes.values(), strict=True))


def check_request(request: ExportTraceServiceRequest, resource: dict[str, Scalar], sent: list[Span]) -> None:
    (resource_spans,) = request.resource_spans
    (scope_spans,) = resource_spans.scope_spans
    assert resource_spans.schema_url == scope_spans.schema_url == SCHEMA_URL
    assert (scope_spans.scope.name, scope_spans.scope.version) == ("oriel", "1.2.3")
    described = [(pair.key, value_of(pair.value)) for pair in resource_spans.resource.attributes]
    assert [key for key, _ in described] == [cleaned(key) for key in resource]
    assert all(same(value, sent) for (_, value), sent in zip(described, resource.values(), strict=True))
    assert len(scope_spans.spans) == len(sent)
    for got, each in zip(scope_spans.spans, sent, strict=True):
        check(got, each)


@settings(max_examples=60)
@given(attributes, st.lists(spans, max_size=6))
def test_the_official_class_reads_the_same_values(resource: dict[str, Scalar], sent: list[Span]) -> None:
    encoder = ProtobufEncoder(resource, "1.2.3")
    # The second time, names and attributes are remembered.
    for _ in range(2):
        check_request(ExportTraceServiceRequest.FromString(encoder.encode(sent)), resource, sent)


@settings(max_examples=60)
@given(attributes, st.lists(spans, max_size=3))
def test_the_official_class_reads_the_same_values_from_json(resource: dict[str, Scalar], sent: list[Span]) -> None:
    document = json.loads(JsonEncoder(resource, "1.2.3").encode(sent))
    # OTLP writes ids in hexadecimal, where protobuf's own JSON form has base64.
    for span in document["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        for name in ("traceId", "spanId", "parentSpanId"):
            span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
    request: Any = json_format.ParseDict(document, ExportTraceServiceRequest())
    check_request(request, resource, sent)


def test_true_one_and_one_point_zero_stay_apart() -> None:
    context = TraceContext(1, 2, True)
    encoder = ProtobufEncoder({}, "1.2.3")
    for value in (1, True, 1.0, "1", 1, True, 0, False, 0.0, -0.0):
        span = Span(name="n", context=context, parent_id=0, start_s=1, end_s=2, attributes={"a": value})
        check_request(ExportTraceServiceRequest.FromString(encoder.encode([span])), {}, [span])


def test_what_is_remembered_is_bounded() -> None:
    context = TraceContext(1, 2, True)
    encoder = ProtobufEncoder({}, "1.2.3")
    for number in range(10_000):
        name = f"name {number}"
        span = Span(name=name, context=context, parent_id=0, start_s=1, end_s=2, attributes={"a": name, "b": number})
        encoder.encode([span])
    assert _remembered.cache_info().currsize <= 4096


@given(st.integers(0, (1 << 63) - 1), texts)
def test_a_partial_success_says_how_many_spans_were_rejected(count: int, why: str) -> None:
    answer = ExportTraceServiceResponse()
    answer.partial_success.rejected_spans = count
    answer.partial_success.error_message = cleaned(why)
    assert ProtobufEncoder.rejected(answer.SerializeToString()) == count
    assert JsonEncoder.rejected(json_format.MessageToJson(answer).encode()) == count
    assert JsonEncoder.rejected(json.dumps({"partialSuccess": {"rejectedSpans": count}}).encode()) == count


@given(st.binary(max_size=64))
def test_an_answer_that_is_not_readable_rejects_nothing_or_a_number(body: bytes) -> None:
    assert 0 <= ProtobufEncoder.rejected(body) < 1 << 63
    assert JsonEncoder.rejected(body) >= 0
