"""Declared pipelines: what the file may say, what runs when, and what it answers."""

import asyncio
import io
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openapi_spec_validator import OpenAPIV31SpecValidator
from PIL import Image

from oriel_logic.bodies.schemas import Writer
from oriel_logic.deploy.samples import with_shown_sample
from oriel_logic.errors import HandlerFailed
from oriel_logic.graph.document import GraphError, parse
from oriel_logic.graph.plan import Plan, Progress, plan_of
from oriel_logic.graph.references import Condition, Fixed, Reference, parse_condition, parse_source
from oriel_logic.graph.schema import input_of, output_of
from oriel_logic.loading.listing import Source
from oriel_logic.server.openapi import document
from oriel_logic.testing import AsyncClient, Client, FakeClock, FakeModels
from oriel_logic.testing.client import loaded_file

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CHAIN = """
    [[step]]
    name = "one"
    model = "m"
    inputs = { x = "request.json.x" }
    [[answer]]
    value = { y = "one.y" }
"""


def planned(text: str) -> Plan:
    document, answers, _ = parse(text.encode(), "p.toml")
    return plan_of(document, answers, "p.toml")


# -- the language ------------------------------------------------------------------------------------------------------


def test_sources() -> None:
    assert parse_source("a.b") == Reference("a", ("b",))
    assert parse_source("request.json.user.age") == Reference("request", ("json", "user", "age"))
    assert parse_source("'some text'") == Fixed("some text")
    assert parse_source(3) == Fixed(3)
    for wrong in ("", "a.", "a b", "a.b.c", "request.nope", "ctx", "ctx.remaining", "__import__('os')", "x" * 300):
        with pytest.raises(ValueError, match="."):
            parse_source(wrong)


def test_conditions() -> None:
    assert parse_condition("a.b >= 0.5") == Condition(Reference("a", ("b",)), ">=", 0.5)
    for text, value, expected in (
        ("a.b == 'x'", "x", True),
        ("a.b != true", False, True),
        ("a.b < -1", -2.0, True),
        ("a.b > 1e3", 1000, False),
        ("ctx.tier == 'gold'", "gold", True),
    ):
        assert parse_condition(text).holds(value) is expected
    for wrong in ("a.b", "a >= 1", "a.b = 1", "a.b >= c.d", "a.b >= 1 and c.d", "f(a.b) > 1", "a.b > 1; x", "1 < a.b"):
        with pytest.raises(ValueError, match="."):
            parse_condition(wrong)
    with pytest.raises(HandlerFailed, match="the condition 'a.b < 1' cannot be decided"):
        parse_condition("a.b < 1").holds("text")


@given(st.text(max_size=40))
def test_any_text_is_a_condition_or_refused_with_a_sentence(text: str) -> None:
    try:
        condition = parse_condition(text)
    except ValueError as error:
        assert 0 < len(str(error)) < 500
    else:
        assert parse_condition(str(condition)).source == condition.source


# -- the file ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (('model = "m"', ""), "p.toml: step 'one': give it either `model` or `run`"),
        (('model = "m"', "model = 3"), "p.toml: step 'one': model: Expected `str`, got `int`"),
        (('model = "m"', 'model = "m"\nmodle = "n"'), "p.toml: step 'one': Object contains unknown field `modle`"),
        (('name = "one"', 'name = "request"'), "p.toml: step 'request': name: "),
        (('name = "one"', ""), "p.toml: step 1: Object missing required field `name`"),
        (("request.json.x", "two.y"), "p.toml: step 'one': there is no step 'two': there are one"),
        (("request.json.x", "one.y"), "p.toml: step 'one': it waits for itself"),
        (("request.json.x", "request.nope"), "p.toml: step 'one': inputs.x: 'request.nope': request has json, "),
        (("one.y", "one y"), "p.toml: answer 1: value.y: 'one y' is not a reference"),
        (("one.y", "request.text"), "p.toml: step 'one': nothing uses it"),
        (('model = "m"', 'model = "m"\nwhen = "one"'), "p.toml: step 'one': when: 'one' is not a condition"),
        (('model = "m"', 'run = "../up.py:f"'), "p.toml: step 'one': run: '../up.py:f' is not file.py:function"),
        (('model = "m"', 'run = "a.py:f"\nversion = "1"'), "p.toml: step 'one': version: goes with `model`"),
        (('model = "m"', 'model = "m"\nfallback = { model = "s" }'), "p.toml: step 'one': fallback: say when"),
        (("[[answer]]", "[[answers]]"), "p.toml: Object contains unknown field `answers`"),
        (("[[step]]", "[options]\ntimeout_s = -1\n[[step]]"), "p.toml: options: timeout_s must be a number above 0"),
        (("[[answer]]", "[[answer]]\nvalue = 'one'\n[[answer]]"), "p.toml: answer 1: only the last one goes without"),
        (("[[step]]", "[[step"), "p.toml is not TOML"),
    ],
)
def test_a_wrong_file_says_where_and_what(change: tuple[str, str], sentence: str) -> None:
    with pytest.raises(GraphError) as refused:
        planned(CHAIN.replace(*change))
    assert str(refused.value).startswith(sentence), str(refused.value)


def test_files_are_bounded() -> None:
    with pytest.raises(GraphError, match="at most 65536 are read"):
        planned("#" * 70_000)
    step = '[[step]]\nname = "s{}"\nmodel = "m"\ninputs = {{ x = 1 }}\n'
    with pytest.raises(GraphError, match="there are 65, 1 to 64"):
        planned("".join(map(step.format, range(65))) + "[answer]\nvalue = 's1'")


def test_a_function_that_is_not_there_is_said_at_load(services: Any) -> None:
    folder = services(steps="def f(a, b=1): return a\nasync def g(a): ...\ndef k(*, a): ...")

    def loaded(run: str, inputs: str = "{ a = 1 }") -> None:
        text = f'[[step]]\nname = "s"\nrun = "{run}"\ninputs = {inputs}\n[answer]\nvalue = "s"'
        (folder / "p.toml").write_text(text)
        Client(folder / "p.toml")

    loaded("steps.py:f")
    for run, inputs, sentence in (
        ("nope.py:f", "{ a = 1 }", "step 's': run: there is no file nope.py"),
        ("steps.py:h", "{ a = 1 }", "step 's': run: steps.py has no function h"),
        ("steps.py:g", "{ a = 1 }", "step 's': run: g must be a plain `def`"),
        ("steps.py:k", "{ a = 1 }", "step 's': run: k must not have keyword-only"),
        ("steps.py:f", "{ c = 1 }", "step 's': inputs: f cannot be called with them"),
    ):
        for name in [each for each in __import__("sys").modules if each.startswith("oriel_services.")]:
            del __import__("sys").modules[name]
        with pytest.raises(TypeError, match=sentence.replace("(", r"\(")):
            loaded(run, inputs)


# -- the planner -------------------------------------------------------------------------------------------------------


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[str, dict[str, float]]:
    """A file of up to seven steps that refer to earlier ones, in any order, and what each step gives."""
    count = draw(st.integers(1, 7))
    tables, gives = [], {}
    for index in range(count):
        earlier = [f"s{each}" for each in range(index)]
        sources = draw(st.lists(st.sampled_from(earlier), max_size=3)) if earlier else []
        inputs = ", ".join(f'i{place} = "{each}.y"' for place, each in enumerate(sources)) or "i = 1"
        if len(sources) > 1 and draw(st.booleans()):
            inputs = "i = [{}]".format(", ".join(f'"{each}.y"' for each in sources))
        when = ""
        if earlier and draw(st.booleans()):
            when = f'when = "{draw(st.sampled_from(earlier))}.y >= 0.5"\n'
        tables.append(f'[[step]]\nname = "s{index}"\nmodel = "m"\ninputs = {{ {inputs} }}\n{when}')
        gives[f"s{index}"] = draw(st.sampled_from([0.0, 1.0]))
    early = draw(st.lists(st.integers(0, count - 1), max_size=2))
    answers = [f'[[answer]]\nwhen = "s{each}.y < 0.5"\nvalue = {{ early = {each} }}\n' for each in early]
    every = ", ".join(f'"s{index}.y"' for index in range(count))
    uses = "".join(f'u{index} = ["s{index}.y", "\'none\'"]\n' for index in range(count))
    answers.append(f"[[answer]]\n[answer.value]\nany = [{every}]\n{uses}")
    return "".join(draw(st.permutations(tables))) + "".join(answers), gives


def no_request(_: Reference) -> Any:
    raise AssertionError


@given(pipelines(), st.randoms(use_true_random=False))
def test_any_order_of_completion_runs_the_same_steps_once_and_answers_the_same(
    pipeline: tuple[str, dict[str, float]], random: Any
) -> None:
    text, gives = pipeline
    plan = planned(text)
    results = []
    for _ in range(3):
        progress = Progress(plan, no_request, lambda source, found: found)
        running: list[str] = []
        started: set[str] = set()
        settled: set[str] = set()
        answer = None
        while answer is None:
            for step, inputs in progress.startable():
                name = step.table.name
                assert name not in started and step.needs <= settled | progress.skipped
                assert set(inputs) == set(step.inputs)
                started.add(name)
                running.append(name)
            answer = progress.answer()
            if answer is None:
                assert running, "nothing runs, and there is no answer"
                done = running.pop(random.randrange(len(running)))
                progress.settle(done, {"y": gives[done]})
                settled.add(done)
        results.append(answer[0])
        if not any(key == "early" for key in answer[0]):
            assert started == settled and started | progress.skipped == set(plan.steps)
            assert not started & progress.skipped
    assert results[0] == results[1] == results[2]


def test_an_answer_that_can_never_be_is_said() -> None:
    plan = planned(CHAIN.replace('model = "m"', 'model = "m"\nwhen = "request.text == \'x\'"'))
    progress = Progress(plan, lambda _: "y", lambda source, found: found)
    assert progress.startable() == [] and progress.skipped == {"one"}
    with pytest.raises(LookupError):
        progress.answer()


# -- running -----------------------------------------------------------------------------------------------------------

SHOP = """
    description = "Ranks, unless the text is bad"

    [[step]]
    name = "guard"
    model = "guard"
    inputs = { x = "request.json.text" }

    [[step]]
    name = "left"
    model = "left"
    inputs = { x = "request.json.text" }

    [[step]]
    name = "rank"
    model = "large"
    inputs = { a = "left.y", b = "guard.y" }
    when = "guard.bad < 0.5"
    fallback = { model = "small", min_remaining_ms = 500, tiers = ["bronze"] }

    [[answer]]
    when = "guard.bad >= 0.5"
    value = { refused = true, why = "'not for us'" }

    [[answer]]
    value = { score = "rank.score", tier = "ctx.tier" }
"""


@pytest.fixture
def shop(services: Any) -> Path:
    folder: Path = services()
    (folder / "shop.toml").write_text("\n".join(line.strip() for line in SHOP.splitlines()))
    return folder / "shop.toml"


def shop_models(bad: float = 0.0, **keywords: Any) -> FakeModels:
    fakes = {
        "guard": {"y": [1.0], "bad": [[bad]]},
        "left": {"y": [2.0]},
        "large": {"score": [0.9]},
        "small": {"score": [0.8]},
    }
    return FakeModels(fakes, **keywords)


def test_a_declared_pipeline_is_a_service(shop: Path) -> None:
    client = Client(shop, models=shop_models())
    assert client.post(json={"text": [1]}, tier="gold").json() == {"score": [0.9], "tier": "gold"}
    assert [call.model for call in client.models.calls] == ["guard", "left", "large"]
    assert {key: value.tolist() for key, value in client.models.calls[2].inputs.items()} == {"a": [2.0], "b": [1.0]}
    assert {call.tier for call in client.models.calls} == {"gold"} and len(
        {c.request_id for c in client.models.calls}
    ) == 1
    missing = client.post(json={"words": 1})
    assert (missing.status_code, missing.json()["error"]["message"]) == (422, "the field 'text' is missing")


def test_the_fallback_is_taken_by_time_and_tier(shop: Path) -> None:
    clock = FakeClock()
    client = Client(shop, models=shop_models(takes_s={"guard": 0.3, "left": 0.3}, clock=clock), clock=clock)
    assert client.post(json={"text": [1]}, timeout_s=5.0).json()["score"] == [0.9]
    assert client.post(json={"text": [1]}, timeout_s=1.0).json()["score"] == [0.8]
    assert client.post(json={"text": [1]}, timeout_s=5.0, tier="bronze").json()["score"] == [0.8]


async def test_independent_steps_run_together_and_an_early_answer_ends_the_rest(shop: Path) -> None:
    left_is_asked, left_is_cancelled = asyncio.Event(), asyncio.Event()

    async def left(x: Any) -> Any:
        left_is_asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            left_is_cancelled.set()

    async def guard(x: Any) -> Any:
        await left_is_asked.wait()  # it is under way at the same time
        return {"y": [1.0], "bad": [[0.7]]}

    models = FakeModels({**shop_models().models, "left": left, "guard": guard})
    answer = await AsyncClient(shop, models=models).post(json={"text": [1]})
    assert answer.json() == {"refused": True, "why": "not for us"}
    assert left_is_cancelled.is_set() and [call.model for call in models.calls] == ["guard", "left"]


def test_each_step_is_a_stage_and_a_span(shop: Path) -> None:
    client = Client(shop, models=shop_models())
    timing = client.post(json={"text": [1]}).headers["server-timing"]
    assert all(f"logic-{name};dur=" in timing for name in ("guard", "left", "rank", "infer"))
    assert {"guard", "left", "rank"} <= {span.name for span in client.spans}


def test_its_fields_are_in_the_openapi_document(shop: Path) -> None:
    plan = planned("\n".join(line.strip() for line in SHOP.splitlines()))
    assert input_of(plan) == {
        "application/json": {"schema": {"type": "object", "properties": {"text": {}}, "required": ["text"]}}
    }
    refused, ranked = output_of(plan, {}, Writer("shop"))["application/json"]["schema"]["anyOf"]
    assert refused["properties"]["refused"] == {"const": True} and ranked["properties"]["score"] == {}
    assert (refused["required"], ranked["required"]) == (["refused", "why"], ["score", "tier"])
    (loaded,) = loaded_file(shop)
    assert loaded.definition is not None and loaded.definition.schemas.input == input_of(plan)
    deep = planned(CHAIN.replace("request.json.x", "request.json.a.b"))
    schema = (input_of(deep) or {})["application/json"]["schema"]
    assert schema["properties"]["a"] == {"type": "object", "properties": {"b": {}}, "required": ["b"]}
    assert input_of(planned(CHAIN.replace("request.json.x", "request.text"))) is None


def test_the_example_is_described_as_what_it_takes_and_gives() -> None:
    """Its schema is what it reads, and the sample that is offered is one that it answers."""
    path = EXAMPLES / "services" / "checked_digit.toml"
    (loaded,) = loaded_file(path)
    assert loaded.definition is not None
    source = Source(file=loaded.file, homes=(path.parent,))
    made = document([with_shown_sample(source, loaded.definition)])
    OpenAPIV31SpecValidator(made).validate()
    post = made["paths"]["/v1/services/checked_digit"]["post"]
    takes = post["requestBody"]["content"]
    assert list(takes) == ["image/png", "image/jpeg", "application/json"]
    blank, digit = post["responses"]["200"]["content"]["application/json"]["schema"]["anyOf"]
    assert blank["properties"] == {"blank": {"const": True}, "reason": {"const": "the picture is empty"}}
    digit = made["components"]["schemas"][digit["$ref"].rpartition("/")[2]]
    assert set(digit["properties"]) == {"label", "confidence", "probabilities"}
    assert sorted(digit["required"]) == ["confidence", "label"]
    outputs = {"label": [[3]], "probabilities": [[0.0, 0.1, 0.1, 0.8]]}
    client = Client(path, models=FakeModels({"digits": outputs}))
    sample = b64decode(takes["image/png"]["x-oriel-sample"])
    answer = client.post(content=sample, headers={"content-type": "image/png"}).json()
    assert answer == {"label": 3, "confidence": 0.8}
    (field,) = takes["application/json"]["schema"]["required"]
    assert client.post(json={field: b64encode(sample).decode()}).json() == answer


@pytest.mark.parametrize("takes", ['"no media" = {}', '"image/png" = 3'])
def test_what_it_takes_is_checked(takes: str) -> None:
    with pytest.raises(GraphError, match=r"p\.toml: .*takes"):
        parse(f"{CHAIN}\n[takes]\n{takes}\n".encode(), "p.toml")


def test_what_a_step_does_not_give_is_said(shop: Path) -> None:
    models = shop_models()
    models.models["large"] = {"points": [1.0]}
    answer = Client(shop, models=models, raise_errors=False).post(json={"text": [1]})
    assert answer.status_code == 500 and "step 'rank' gave no 'score': it gave points" in answer.text
    models.models["guard"] = {"y": [1.0], "bad": [0.1, 0.2]}
    answer = Client(shop, models=models, raise_errors=False).post(json={"text": [1]})
    assert "the condition on 'guard.bad' needs one value, there are 2" in answer.text


async def test_every_step_carries_the_request_to_the_inference_server(
    stack: Any, services: Any, inference: Any
) -> None:
    """With worker processes and a v2 server: what the example says is what happens."""
    logic = await stack(EXAMPLES / "services")
    seven = (EXAMPLES / "digits" / "7.png").read_bytes()
    answer = await logic.post(
        "checked_digit",
        seven,
        content_type="image/png",
        x_oriel_tier="gold",
        x_oriel_tenant="acme",
        x_oriel_timeout_ms="4000",
        x_request_id="r-9",
    )
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["label"] == 7 and found["confidence"] > 0.5 and len(found["probabilities"]) == 10
    (exchange,) = inference.calls
    head = exchange.head
    assert [head.get(f"x-oriel-{name}") for name in ("tier", "tenant")] == ["gold", "acme"]
    assert head.get("x-request-id") == "r-9" and 0 < int(head.get("x-oriel-timeout-ms")) <= 4000
    blank = io.BytesIO()
    Image.fromarray(np.full((20, 20), 255, np.uint8)).save(blank, "PNG")
    answer = await logic.post("checked_digit", blank.getvalue(), content_type="image/png")
    assert answer.json() == {"blank": True, "reason": "the picture is empty"} and len(inference.calls) == 1
