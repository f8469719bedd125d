"""What OpenTelemetry's environment variables say, and what is refused at the start."""

import pytest

from oriel_wire.errors import StartFailed
from oriel_wire.observe.otel_settings import (
    BUFFER_VARIABLE,
    DEFAULT_RATIO,
    buffer_of,
    collector_of,
    queue_of,
    resource_of,
    sampling_of,
)
from oriel_wire.observe.sampling import Sampling

AT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318/"}


def test_the_endpoint_gets_the_path_of_traces_and_the_own_one_of_traces_stays() -> None:
    found = collector_of(AT)
    assert found is not None and found.url == "http://collector:4318/v1/traces"
    assert (found.json, found.gzip, found.timeout_s, found.tls) == (False, True, 10.0, None)
    found = collector_of({**AT, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://other/in"})
    assert found is not None and found.url == "https://other/in" and found.tls is not None


def test_settings_of_traces_come_before_those_of_all_signals() -> None:
    found = collector_of(
        {
            **AT,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
            "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "2500",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
            "OTEL_EXPORTER_OTLP_HEADERS": "a=1,b=x%20y,broken",
        }
    )
    assert found is not None and (found.json, found.timeout_s, found.gzip) == (True, 2.5, False)
    assert found.headers == {"a": "1", "b": "x y"}


@pytest.mark.parametrize("given", [{}, {**AT, "OTEL_TRACES_EXPORTER": "none"}, {**AT, "OTEL_SDK_DISABLED": "TRUE"}])
def test_no_collector(given: dict[str, str]) -> None:
    assert collector_of(given) is None


def test_the_buffer_stays_without_an_exporter_but_not_when_all_is_disabled() -> None:
    given = {BUFFER_VARIABLE: "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"}
    assert buffer_of(given) == "http://127.0.0.1:1"
    assert buffer_of({**given, "OTEL_SDK_DISABLED": "true"}) == ""


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "not sent over gRPC.*http/protobuf.*4318"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "thrift"}, "neither http/protobuf nor http/json"),
        ({"OTEL_EXPORTER_OTLP_COMPRESSION": "zstd"}, "neither gzip nor none"),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "10s"}, "OTEL_EXPORTER_OTLP_TIMEOUT is not a number of milliseconds"),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "neither otlp nor none: zipkin"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317"}, r"not http\(s\)://HOST"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://c", "OTEL_EXPORTER_OTLP_CERTIFICATE": "/no/such/file"},
            "certificate for the collector",
        ),
    ],
)
def test_a_collector_that_cannot_be_used_is_refused_with_a_sentence(given: dict[str, str], text: str) -> None:
    with pytest.raises(StartFailed, match=text):
        collector_of({**AT, **given})


@pytest.mark.parametrize(
    ("given", "ratio", "parent_based"),
    [
        ({}, DEFAULT_RATIO, True),
        ({BUFFER_VARIABLE: "http://127.0.0.1:1"}, 1.0, True),
        ({BUFFER_VARIABLE: "http://127.0.0.1:1", "OTEL_TRACES_SAMPLER_ARG": "0.5"}, 0.5, True),
        ({"OTEL_TRACES_SAMPLER_ARG": "0.25"}, 0.25, True),
        ({"OTEL_TRACES_SAMPLER": "always_on"}, 1.0, False),
        ({"OTEL_TRACES_SAMPLER": "always_off", "OTEL_TRACES_SAMPLER_ARG": "0.25"}, 0.0, False),
        ({"OTEL_TRACES_SAMPLER": "traceidratio"}, 1.0, False),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.25"}, 0.25, False),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_on"}, 1.0, True),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_off"}, 0.0, True),
        ({"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.25"}, 0.25, True),
    ],
)
def test_samplers(given: dict[str, str], ratio: float, parent_based: bool) -> None:
    assert sampling_of(given) == Sampling.by_ratio(ratio, parent_based=parent_based)


@pytest.mark.parametrize(
    "given",
    [{"OTEL_TRACES_SAMPLER": "jaeger_remote"}, *({"OTEL_TRACES_SAMPLER_ARG": arg} for arg in ("2", "nan", "x"))],
)
def test_a_sampler_that_is_not_known_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(StartFailed, match="OTEL_TRACES_SAMPLER"):
        sampling_of(given)


def test_a_collector_at_a_port_or_host_that_cannot_be_is_refused() -> None:
    for url in ("http://collector:65536", "http://[collector", "http://collector:x"):
        with pytest.raises(StartFailed, match=r"not http\(s\)://HOST"):
            collector_of({"OTEL_EXPORTER_OTLP_ENDPOINT": url})


def test_queue() -> None:
    assert queue_of({"OTEL_BSP_MAX_QUEUE_SIZE": "100", "OTEL_BSP_SCHEDULE_DELAY": "5000"}).max_spans == 100
    assert queue_of({"OTEL_BSP_SCHEDULE_DELAY": "5000"}).delay_s == 5.0
    with pytest.raises(StartFailed, match="OTEL_BSP_MAX_QUEUE_SIZE"):
        queue_of({"OTEL_BSP_MAX_QUEUE_SIZE": "0"})


def test_a_process_is_described() -> None:
    one, other = resource_of("gateway", {}), resource_of("gateway", {})
    assert (one["service.namespace"], one["service.name"]) == ("oriel", "oriel-gateway")
    assert one["service.version"] and one["service.instance.id"] != other["service.instance.id"]


def test_a_pod_has_one_instance_id_and_the_attributes_of_its_environment() -> None:
    given = {"OTEL_RESOURCE_ATTRIBUTES": "k8s.pod.uid=7,k8s.pod.name=g-0,service.name=x,deployment.environment=a%2Cb"}
    one, other = resource_of("gateway", given), resource_of("gateway", given)
    assert one == other
    assert (one["k8s.pod.name"], one["service.name"], one["deployment.environment"]) == ("g-0", "x", "a,b")
    named = resource_of("gateway", {**given, "OTEL_SERVICE_NAME": "y"})
    assert named["service.name"] == "y" and named["service.instance.id"] != one["service.instance.id"]
