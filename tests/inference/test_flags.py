"""tritonserver's command line: what is honoured, taken without effect, refused; and docs/tritonserver-flags.md."""

import logging
import os
from pathlib import Path

import pytest

from oriel_cli.arguments import Parser
from oriel_inference import command
from oriel_inference.flags import FOREIGN, settle
from oriel_inference.repository.defaults import LoadDefaults, from_backend_config
from oriel_inference.settings import Settings
from oriel_wire.errors import StartFailed
from oriel_wire.observe.otel_settings import collector_of, queue_of, resource_of, sampling_of
from oriel_wire.observe.sampling import Sampling

DOCS = Path(__file__).resolve().parents[2] / "docs" / "tritonserver-flags.md"


def parser() -> Parser:
    made = Parser(prog="oriel inference")
    command.add_arguments(made)
    return made


def settings_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> Settings:
    """What `oriel inference` would serve with."""
    seen: list[Settings] = []

    def serve(settings: Settings, stop: object) -> None:
        seen.append(settings)

    def run_unit(main: object, **options: object) -> int:
        main(None)  # type: ignore[operator]
        return 0

    monkeypatch.setattr("oriel_inference.app.serve", serve)
    monkeypatch.setattr("oriel_wire.process.process.run_unit", run_unit)
    monkeypatch.setattr("oriel_wire.process.logs.configure_logging", lambda unit: None)
    assert command.run(parser().parse_args(["--model-repository", "/m", *words])) == 0
    return seen[0]


def documented() -> tuple[dict[str, str], set[str]]:
    """tritonserver's flags with their class, and our own."""
    tritons, _, own = DOCS.read_text().partition("## Oriel's own")
    rows = [line.split("|") for line in tritons.splitlines() if line.startswith("| `--")]
    return (
        {name.strip(" `"): row[2].strip() for row in rows for name in row[1].split(",")},
        {line.split("`")[1] for line in own.splitlines() if line.startswith("| `--")},
    )


def test_the_table_and_the_parser_agree_on_every_flag() -> None:
    tritons, own = documented()
    taken = {flag for flag in parser()._flags() if flag.startswith("--")}
    assert taken == tritons.keys() | own
    expected = {
        flag: ("refused" if FOREIGN[flag].refused else "accepted") if flag in FOREIGN else "honoured"
        for flag in tritons
    }
    assert tritons == expected


@pytest.mark.parametrize("form", ["{}={}", "{} {}"])
def test_both_forms_and_all_booleans(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    for text, value in {
        "true": True,
        "1": True,
        "on": True,
        "False": False,
        "0": False,
        "off": False,
        "any": "any",
    }.items():
        words = form.format("--strict-readiness", text).split()
        assert settings_of(monkeypatch, *words).strict_readiness is value


def test_a_whole_command_line_of_a_triton_user(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    line = (
        "--model-store=/n --http-address=0.0.0.0 --http-port=9000 --grpc-port 9001 --allow-metrics=true "
        "--model-control-mode=EXPLICIT --load-model=a --load-model=b --exit-on-error=true --exit-timeout-secs=7 "
        "--log-verbose=1 --log-info=false --log-format=ISO8601 --id=mine --strict-model-config=true "
        "--backend-config=onnxruntime,intra_op_thread_count=2 --backend-config=default-max-batch-size=16 "
        "--http-thread-count=8 --http-thread-count=9 --pinned-memory-pool-byte-size=268435456 "
        "--cuda-memory-pool-byte-size=0:67108864 --min-supported-compute-capability=6.0 --rate-limit=off "
        "--grpc-use-ssl=false --model-load-thread-count=3 --grpc-keepalive-time=10000 --trace-count -1 "
        "--metrics-interval-ms=2000 --grpc-max-connection-age=60000"
    )
    with caplog.at_level(logging.WARNING):
        settings = settings_of(monkeypatch, *line.split())
    assert settings.repositories == (Path("/m"), Path("/n"))
    assert (settings.http_host, settings.metrics_host, settings.grpc_host) == ("0.0.0.0", "0.0.0.0", "127.0.0.1")
    assert (settings.http_port, settings.grpc_port, settings.metrics_port) == (9000, 9001, 8002)
    assert (settings.control_mode, settings.load_models) == ("explicit", ("a", "b"))
    assert settings.exit_on_error and settings.strict_readiness and settings.drain_s == 7.0
    assert settings.log == {"log_verbose_level": 1, "log_info": False, "log_format": "ISO8601"}
    assert (settings.load_threads, settings.server_id) == (3, "mine")
    assert settings.grpc_max_age_ms == 60000
    assert settings.load_defaults == LoadDefaults(intra_op_threads=2, max_batch_size=16, auto_complete=False)
    assert not caplog.records, "what has no effect is listed once, at the end of the start"
    assert [warning.split()[0] for warning in settings.without_effect] == [
        "--http-thread-count",
        "--pinned-memory-pool-byte-size",
        "--cuda-memory-pool-byte-size",
        "--min-supported-compute-capability",
        "--grpc-keepalive-time",
        "--metrics-interval-ms",
    ]


@pytest.mark.parametrize(
    ("words", "url", "left"),
    [
        (["mode=opentelemetry,url=http://collector:4318/v1/traces"], "http://collector:4318/v1/traces", ""),
        (["mode=opentelemetry", "opentelemetry,url=collector:4318/v1/traces"], "http://collector:4318/v1/traces", ""),
        (["mode=opentelemetry", "rate=100"], "", ""),
        (["triton,file=/tmp/trace.json", "level=TIMESTAMPS"], "", ""),
        (["level=TIMESTAMPS"], "", "--trace-config level=... has no effect"),
        (["triton,colour=1"], "", "--trace-config colour=... has no effect"),
    ],
)
def test_traces_go_to_the_collector_that_tritons_flag_names(
    monkeypatch: pytest.MonkeyPatch, words: list[str], url: str, left: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
    settings = settings_of(monkeypatch, *[f"--trace-config={each}" for each in words])
    found = collector_of()
    assert (found.url if found is not None else "") == url
    assert [each.partition(":")[0] for each in settings.without_effect] == ([left] if left else [])


def test_spans_follow_tritons_settings_of_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_TRACES_SAMPLER_ARG", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_BSP_SCHEDULE_DELAY", "OTEL_SDK_DISABLED"):
        monkeypatch.setenv(name, "host.name=h,zone=b" if name == "OTEL_RESOURCE_ATTRIBUTES" else "")
    words = ["mode=opentelemetry", "rate=4", "level=TIMESTAMPS", "opentelemetry,resource=service.name=mine"]
    words += ["opentelemetry,resource=zone=a", "opentelemetry,bsp_schedule_delay=1500"]
    settings = settings_of(monkeypatch, *[f"--trace-config={each}" for each in words])
    assert sampling_of() == Sampling.by_ratio(0.25) and queue_of().delay_s == 1.5
    assert {"service.name": "mine", "zone": "a", "host.name": "h"}.items() <= resource_of("inference").items()
    assert settings.traces.mode == "opentelemetry" and not settings.without_effect
    settings = settings_of(monkeypatch, "--trace-config=mode=opentelemetry", "--trace-level=off", "--trace-count=5")
    assert [each.partition("=")[0] for each in settings.without_effect] == ["--trace-config count"]
    assert os.environ["OTEL_SDK_DISABLED"] == "true"


def test_the_older_flags_set_the_same_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--trace-file=/t", "--trace-level=TIMESTAMPS", "--trace-level=TENSORS", "--trace-rate=7"]
    found = settings_of(monkeypatch, *words, "--trace-count=8", "--trace-log-frequency=9").traces
    assert (found.mode, found.file) == ("triton", "/t")
    assert list(found.values.values()) == [("TIMESTAMPS", "TENSORS"), 7, 8, 9]


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("tensorrt,version-compatible", "engine_host_code"),
        ("onnxruntime,require-accelerators", "require_accelerators"),
    ],
)
def test_switches_of_backends_are_off_unless_a_flag_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, key: str, name: str
) -> None:
    assert getattr(settings_of(monkeypatch).load_defaults, name) is False
    for text, on in (("true", True), ("false", False)):
        assert getattr(settings_of(monkeypatch, f"--backend-config={key}={text}").load_defaults, name) is on


def test_a_port_that_is_not_allowed_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(monkeypatch, "--allow-grpc=0", "--allow-metrics=false")
    assert (settings.http_port, settings.grpc_port, settings.metrics_port) == (8000, None, None)


@pytest.mark.parametrize("word", ["--cache-config=local,size=4096", "--response-cache-byte-size=4096"])
def test_both_flags_of_the_response_cache_set_its_size(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    assert settings_of(monkeypatch, word).cache_bytes == 4096


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--http-prot=1"], "unknown flag --http-prot, did you mean --http-port?"),
        (["--http-por", "1"], "unknown flag --http-por, did you mean --http-port?"),
        (["--qqqqqqqqqqqqqqqqqqqqqqqqqqqq"], "unknown flag --qqqqqqqqqqqqqqqqqqqqqqqqqqqq ("),
        (["--model-repository=/m", "--http-port"], "--http-port: expected one argument"),
        (["--model-repository=/m", "--allow-http=maybe"], "--allow-http: 'maybe' is neither true nor false"),
        (["--cache-config=redis,host=h"], "'redis,host=h' is not local,size=BYTES, and the server has no other cache"),
        (["--cache-config=local,host=h"], "'local,host=h' is not local,size=BYTES"),
        (["--cache-config=local,size=x"], "'x' is not a number"),
        ([], "required: --model-repository/--model-store"),
    ],
)
def test_wrong_words_are_one_line_and_exit_2(capsys: pytest.CaptureFixture[str], words: list[str], line: str) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(words)
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == "" and said.err.count("\n") == 1 and line in said.err


@pytest.mark.parametrize("name", [flag.name for flag in FOREIGN.values() if flag.refused])
def test_what_would_be_unsafe_to_ignore_stops_the_start(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with pytest.raises(StartFailed, match=f"{name} is refused") as stopped:
        settings_of(monkeypatch, f"{name}=true;k=v")
    assert "\n" not in str(stopped.value)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--load-model=a"], "needs --model-control-mode explicit"),
        (["--model-control-mode=explicit", "--load-model=*", "--load-model=a"], "must be the only --load-model"),
        (["--trace-config=mode=zipkin"], "mode=zipkin is neither triton nor opentelemetry"),
        (["--trace-rate=x"], "--trace-config: Unable to parse 'trace_rate', got: x"),
        (["--allow-http=false", "--allow-grpc=false"], "neither HTTP nor gRPC"),
        (
            ["--backend-config=onnxruntime,foo=1"],
            "'onnxruntime,foo' is not a setting, there are default-max-batch-size",
        ),
        (["--backend-config=tensorrt,version-compatible=maybe"], "tensorrt,version-compatible must be true or false"),
        (["--backend-config=onnxruntime"], "the form is <backend>,<key>=<value>"),
        (["--backend-config=,default-max-batch-size=1"], "the form is"),
        (["--backend-config=onnxruntime,intra_op_thread_count=-1"], "must be a number from 0"),
    ],
)
def test_flags_that_contradict_stop_the_start(monkeypatch: pytest.MonkeyPatch, words: list[str], why: str) -> None:
    with pytest.raises(StartFailed, match=why.replace("*", r"\*")):
        settings_of(monkeypatch, *words)


def test_a_value_that_asks_for_what_holds_is_silent() -> None:
    given = [(flag.name, value.upper()) for flag in FOREIGN.values() for value in flag.silent]
    assert len(given) > 3 and settle(given) == []


def test_backend_settings_without_effect_are_named() -> None:
    defaults, warnings = from_backend_config(
        ["onnxruntime,enable-global-threadpool=1", "python,shm-growth-byte-size=1", "tensorflow,version=2"]
    )
    assert defaults == LoadDefaults() and len(warnings) == 3
    assert "enable-global-threadpool has no effect" in warnings[0]


def test_a_log_file_that_cannot_be_opened_stops_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match="cannot be opened: Is a directory"):
        settings_of(monkeypatch, f"--log-file={tmp_path}")


@pytest.mark.parametrize(
    ("mode", "words", "ports"),
    [
        ("", "", (8000, 8001, None, None)),
        ("", "--allow-sagemaker=true --sagemaker-port=0 --allow-vertex-ai=1 --allow-grpc=0", (8000, None, 0, 8888)),
        ("PREDICTION", "", (None, None, None, 8888)),
        ("PREDICTION", "--allow-http=true --vertex-ai-port=9", (8000, None, None, 9)),
        ("PREDICTION", "--allow-vertex-ai=false --allow-grpc=true", (None, 8001, None, None)),
    ],
)
def test_ports_of_clouds(monkeypatch: pytest.MonkeyPatch, mode: str, words: str, ports: tuple[int | None, ...]) -> None:
    monkeypatch.setenv("AIP_MODE", mode)
    monkeypatch.setenv("AIP_HTTP_PORT", "8888")
    found = settings_of(monkeypatch, *words.split())
    assert (found.http_port, found.grpc_port, found.sagemaker_port, found.vertex_port) == ports
    monkeypatch.setenv("AIP_HTTP_PORT", "junk")
    if found.vertex_port == 8888:
        with pytest.raises(StartFailed, match="AIP_HTTP_PORT has to be the number of a port: 'junk'"):
            settings_of(monkeypatch, *words.split())
    else:
        settings_of(monkeypatch, *words.split())
