"""How `oriel tune` changes a `config.pbtxt`: only what it has to, and so that `patch` and the server take it."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_cli.errors import CommandFailed
from oriel_inference.repository.compiling import ITSELF, variants
from oriel_tools.tune.calibration import VARIANTS, variants_of
from oriel_tools.tune.config_text import Unreadable, patch, put, put_parameter
from oriel_tools.tune.machine import artefact_of
from oriel_tools.tune.setting import Engine, Setting, Subject, changed, changes, engines, neighbours
from oriel_wire.errors import StartFailed
from oriel_wire.v2.metadata import parse_config_text

TEXT = """\
# The digits model of the demo.
name: "digits"  # as the folder
backend: "onnxruntime"
max_batch_size: 64 # the owner's bound

input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [
  { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }
]
dynamic_batching {
  # waits for others
  max_queue_delay_microseconds: 20000
  preferred_batch_size: 4, preferred_batch_size: 8  # two of them
}
instance_group [ { count: 1 kind: KIND_CPU } ]
parameters { key: "other" value: { string_value: "{ # no comment }" } }
parameters {
  key: "intra_op_thread_count"
  value: { string_value: "1" }
}
"""


def subject(text: str = TEXT, *, cores: int = 4, **completed: int) -> Subject:
    config = parse_config_text(text)
    config.name, config.backend = "digits", "onnxruntime"
    if not config.instance_group:
        config.instance_group.add(count=1)
    for field, value in completed.items():
        setattr(config, field, value)
    return Subject(model="digits", text=text, completed=config, cores=cores)


def test_the_present_setting_is_read_from_the_configuration() -> None:
    present = subject().present
    assert present == Setting(max_rows=64, preferred=(4, 8), delay_us=20_000, instances=1, threads=1)
    assert subject("max_batch_size: 8 instance_group { count: 2 }").present.threads == 2, "half of the cores"
    assert subject("").present == Setting(max_rows=0, instances=1, threads=4)


def test_nothing_is_changed_for_the_present_setting() -> None:
    assert changed(subject(), subject().present) == TEXT
    assert patch("digits/config.pbtxt", TEXT, TEXT) == ""


def test_a_patch_has_the_changed_fields_and_nothing_else() -> None:
    wanted = Setting(max_rows=32, delay_us=500, instances=2, threads=1)
    text = changed(subject(), wanted)
    assert patch("digits/config.pbtxt", TEXT, text).splitlines() == [
        "--- a/digits/config.pbtxt",
        "+++ b/digits/config.pbtxt",
        "@@ -1,7 +1,7 @@",
        " # The digits model of the demo.",
        ' name: "digits"  # as the folder',
        ' backend: "onnxruntime"',
        "-max_batch_size: 64 # the owner's bound",
        "+max_batch_size: 32 # the owner's bound",
        " ",
        ' input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]',
        " output [",
        "@@ -9,10 +9,9 @@",
        " ]",
        " dynamic_batching {",
        "   # waits for others",
        "-  max_queue_delay_microseconds: 20000",
        "-  preferred_batch_size: 4, preferred_batch_size: 8  # two of them",
        "+  max_queue_delay_microseconds: 500",
        " }",
        "-instance_group [ { count: 1 kind: KIND_CPU } ]",
        "+instance_group [ { count: 2 kind: KIND_CPU } ]",
        ' parameters { key: "other" value: { string_value: "{ # no comment }" } }',
        " parameters {",
        '   key: "intra_op_thread_count"',
    ]


SETTINGS = st.builds(
    Setting,
    max_rows=st.sampled_from([8, 16, 64]),
    preferred=st.sampled_from([(), (4,), (4, 8)]),
    delay_us=st.sampled_from([0, 100, 20_000]),
    instances=st.integers(1, 4),
    threads=st.integers(1, 4),
    provider=st.sampled_from(["", "OpenVINOExecutionProvider"]),
    compiler=st.sampled_from(["", "openvino"]),
    variant=st.sampled_from(["", "int8"]),
)
PARAMETERS = ("oriel.execution_provider", "oriel.compile", "oriel.variant")
PARTS = st.tuples(
    st.sampled_from(
        ["max_batch_size: 64", "max_batch_size: 64 ;", "max_batch_size : 64  # rows", "max_batch_size:\n64"]
    ),
    st.sampled_from(
        [
            "",
            "dynamic_batching { }",
            "dynamic_batching{}",
            "dynamic_batching: <\n>",
            "dynamic_batching {\n\tpreserve_ordering: false # as it was\n}",
            "dynamic_batching { # all\n    preferred_batch_size: [ 4, 8 ]\n  }",
            "dynamic_batching { preferred_batch_size: 8 , preferred_batch_size: 4; max_queue_delay_microseconds: 7 }",
        ]
    ),
    st.sampled_from(
        [
            "",
            "instance_group [ { kind: KIND_CPU } ]",
            "instance_group { count: 3 }",
            "instance_group [\n  {\n    # two\n    count: 2\n  }\n]",
        ]
    ),
    st.sampled_from(
        [
            "",
            'parameters { key: "intra_op_thread_count" value { string_value: "2" } }',
            "parameters: [ { key: 'a' value: { string_value: 'it\\'s } #' } }, "
            "{key:'intra_op_thread_count' value:{}} ]",
        ]
    ),
)


@given(PARTS, SETTINGS, st.sampled_from(["\n", "\r\n", '\n# a comment: { [ "\n']), st.booleans())
def test_any_setting_can_be_written_into_any_form_of_the_text(
    parts: tuple[str, ...], wanted: Setting, between: str, ends: bool
) -> None:
    """`changed` itself compares what the text says with what it should say, by the parser of the server."""
    text = between.join([part for part in parts if part]) + ("\n" if ends else "")
    model = subject(text)
    after = changed(model, wanted)
    config = parse_config_text(after)
    assert config.max_batch_size == wanted.max_rows
    assert config.dynamic_batching.max_queue_delay_microseconds == wanted.delay_us
    assert tuple(sorted(config.dynamic_batching.preferred_batch_size)) == wanted.preferred
    again = replace(model, text=after, completed=subject(after).completed)
    assert (again.present.threads, again.written.instance_group[:1]) == (wanted.threads, config.instance_group[:1])
    kept = [line for line in text.split("\n") if "comment" in line]
    assert [line for line in after.split("\n") if "comment" in line] == kept
    parameters = {key: config.parameters[key].string_value for key in PARAMETERS if key in config.parameters}
    given = dict(zip(PARAMETERS, (wanted.provider, wanted.compiler, wanted.variant), strict=True))
    assert parameters == {key: value for key, value in given.items() if value}
    as_written = replace(wanted, provider="", compiler="", variant="", instances=again.present.instances)
    assert changed(again, as_written) == after


@pytest.mark.skipif(shutil.which("patch") is None, reason="there is no patch")
@pytest.mark.parametrize("before", [TEXT, TEXT.rstrip("\n"), "", TEXT.replace("\n", "\r\n")])
def test_patch_takes_the_patch(tmp_path: Path, before: str) -> None:
    model = subject(before) if before else subject(before, max_batch_size=64)
    after = changed(model, Setting(max_rows=32, delay_us=500, preferred=(16,), instances=2, threads=1))
    (tmp_path / "digits").mkdir()
    file = tmp_path / "digits/config.pbtxt"
    if before:
        file.write_bytes(before.encode())
    made = patch("digits/config.pbtxt", before, after)
    done = subprocess.run(
        ["patch", "-p1", "--binary"], input=made.encode(), cwd=tmp_path, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert file.read_bytes().decode() == after
    assert parse_config_text(after).max_batch_size == 32


def test_a_model_without_a_configuration_keeps_its_batching() -> None:
    config = parse_config_text("max_batch_size: 4 dynamic_batching { } instance_group { count: 1 }")
    model = Subject(model="m", text="", completed=config, cores=2)
    after = changed(model, Setting(max_rows=2, instances=1, threads=2))
    assert after == "max_batch_size: 2\ndynamic_batching { }\n"
    assert patch("m/config.pbtxt", "", after).startswith("--- /dev/null\n+++ b/m/config.pbtxt\n@@ -0,0 +1,2 @@\n")


@pytest.mark.parametrize("group", ["", "instance_group { kind: KIND_CPU }"])
def test_one_instance_stays_one_where_the_server_would_choose_more_for_fewer_threads(group: str) -> None:
    model = subject(f"max_batch_size: 4 {group}", cores=4)
    model.completed.instance_group[0].count = 1  # of four threads, as many as there are cores
    for wanted in (replace(model.present, threads=1), replace(model.present, provider="OpenVINOExecutionProvider")):
        assert parse_config_text(changed(model, wanted)).instance_group[0].count == 1
    assert changed(model, replace(model.present, max_rows=2)) == f"max_batch_size: 2 {group}"


@pytest.mark.parametrize(
    "text",
    [
        "max_batch_size: 64 instance_group { count: 1 } instance_group { count: 1 }",
        "max_batch_size: 64 instance_group [ { count: 1 }, { count: 2 } ]",
    ],
)
def test_what_cannot_be_changed_is_refused(text: str) -> None:
    model = subject(text, cores=8)
    with pytest.raises(CommandFailed, match="digits/config.pbtxt cannot be changed by this command: there is not exac"):
        changed(model, replace(model.present, instances=4))


@pytest.mark.parametrize(
    "text", ["a {", "[x.y] { }", "a: }", "a: 1 }", "a: [ 1", "a: /", 'a: "x', ": 1", "a: <}", "a {" * 99]
)
def test_a_text_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(Unreadable):
        put(text, "b", "1")


@given(st.text('ab:{}[]<>;,"#\n \\', max_size=40))
def test_any_text_is_changed_or_refused(text: str) -> None:
    try:
        after = put(put_parameter(text, "k", "v"), "c", "1", within="b")
    except Unreadable:
        return
    assert put(after, "c", "1", within="b") == after


def test_the_engines_that_use_most_of_the_cores_come_first() -> None:
    found = engines(subject(cores=4))
    assert found[0] == Engine(instances=1, threads=1), "the present one"
    assert {(each.instances, each.threads) for each in found[1:4]} == {(4, 1), (2, 2), (1, 4)}
    assert len(found) == len(set(found)) and all(each.instances * each.threads <= 4 for each in found)
    more = engines(subject(cores=2), ["OpenVINOExecutionProvider"])
    assert len(more) == 2 * len(engines(subject(cores=2)))
    assert {each.provider for each in more} == {"", "OpenVINOExecutionProvider"}
    by_all = engines(subject(cores=2), ["OpenVINOExecutionProvider"], ["openvino"], ["fp16", "int8"])
    assert len(by_all) == 5 * len(engines(subject(cores=2)))
    assert [(each.threads, each.provider + each.compiler + each.variant) for each in by_all[1:6]] == [
        (1, ""),
        (1, "fp16"),
        (1, "int8"),
        (1, "openvino"),
        (1, "OpenVINOExecutionProvider"),
    ], "everything that can execute the model is seen with one number of threads, before the next number"
    grouped = subject("max_batch_size: 4 instance_group { count: 1 } instance_group { count: 1 }")
    assert {each.instances for each in engines(grouped)} == {2}
    on_gpu = engines(subject("max_batch_size: 4 instance_group { count: 2 kind: KIND_GPU }", cores=1))
    assert [(each.instances, each.threads) for each in on_gpu] == [(2, 1), (4, 1), (1, 1)]


@pytest.mark.parametrize("key", ["oriel.execution_provider", "oriel.compile", "oriel.variant"])
def test_what_the_owner_chose_to_execute_the_model_stays(key: str) -> None:
    chosen = subject(f'{TEXT} parameters {{ key: "{key}" value {{ string_value: "v" }} }}', cores=2)
    assert engines(chosen, ["p"], ["c"], ["int8"]) == engines(chosen)
    python = subject(cores=2)
    python.completed.backend = "python"
    assert engines(python, ["p"], ["c"], ["int8"]) == engines(python)


def test_only_variants_that_all_versions_have_are_tried(tmp_path: Path) -> None:
    for name in ("1/model.onnx", "1/model.int8.onnx", "1/model.fp16.onnx", "1/net.bf16.onnx", "2/model.onnx"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "7").mkdir()
    (tmp_path / "config.pbtxt").touch()
    assert variants_of(tmp_path, "") == []
    (tmp_path / "2/model.int8.onnx").touch()
    assert variants_of(tmp_path, "") == variants_of(tmp_path, "model.onnx") == ["int8"]
    (tmp_path / "1/net.onnx").touch()
    assert variants_of(tmp_path, "net.onnx") == ["bf16"]
    assert variants_of(tmp_path, "absent.onnx") == []
    assert {*VARIANTS, ITSELF} == set(variants()), "all that a server knows"


@pytest.mark.parametrize(
    ("states", "found"),
    [
        ([], ""),
        ([("serving", "")], ""),
        ([("checking", "")], None),
        ([("absent", "")], None),
        ([("absent", "openvino is not installed")], "absent: openvino is not installed"),
        ([("refused", "output 'y' differs")], "refused: output 'y' differs"),
        ([("serving", ""), ("building", "")], None),
        ([("serving", ""), ("refused", "it crashed")], "refused: it crashed"),
    ],
)
def test_an_artefact_is_waited_for_until_it_serves_or_will_not(
    states: list[tuple[str, str]], found: str | None
) -> None:
    lines = [
        {"name": "m", "version": str(number), "artefact": {"state": state, "reason": reason}}
        for number, (state, reason) in enumerate(states, 1)
    ]
    others: list[dict[str, object]] = [
        {"name": "m", "version": "9"},
        {"name": "n", "artefact": {"state": "building", "reason": ""}},
    ]
    assert artefact_of([*lines, *others], "m") == found


@given(st.integers(1, 300), st.integers(1, 64), st.floats(0.1, 10_000.0))
def test_settings_that_are_tried_are_valid_and_differ_in_one_field(most: int, rows: int, bound_ms: float) -> None:
    model = subject(f"max_batch_size: {most} dynamic_batching {{ preferred_batch_size: {most} }}")
    rows = min(rows, most)
    for field, found in neighbours(model.present, model, rows=rows, bound_ms=bound_ms).items():
        for each in found:
            assert rows <= each.max_rows <= most and all(1 <= size <= each.max_rows for size in each.preferred)
            assert set(changes(model.present, each)) <= {field, "preferred"} and field in changes(model.present, each)
            assert 0 <= each.delay_us <= 400 * bound_ms + 100


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('ensemble_scheduling { step { model_name: "a" } }', "is an ensemble"),
        ("model_transaction_policy { decoupled: true }", "is decoupled"),
    ],
)
def test_what_has_no_batches_of_its_own_is_not_tuned(text: str, why: str) -> None:
    with pytest.raises(StartFailed, match=why):
        subject(text).check()
