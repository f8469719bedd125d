"""`/v1/embeddings` through the official client, with an encoder whose vectors are known."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from tokenizers import Tokenizer

from .conftest import ENCODER, TABLE, WIDTH, Behind, Maker


def tokens_of(tokenizer: Path, text: str) -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(tokenizer)).encode(text).ids
    return ids


def expected(ids: list[int], dimensions: int = WIDTH) -> Any:
    mean = TABLE[ids].mean(axis=0)[:dimensions]
    return mean / np.linalg.norm(mean)


async def test_texts_become_unit_vectors_in_their_order(served: Maker, tokenizer: Path, behind: Behind) -> None:
    client, _ = await served()
    texts = ["The weather is lovely today.", "a", "one tier from the first byte", "It's", "sunny", "one deadline"]
    for encoding in ("float", "base64", None):
        asked = {} if encoding is None else {"encoding_format": encoding}
        answer = await client.embeddings.create(model="words", input=texts, **asked)  # type: ignore[arg-type]
        assert answer.object == "list" and answer.model == "words"
        assert [each.index for each in answer.data] == list(range(6))
        for text, each in zip(texts, answer.data, strict=True):
            vector: Any = each.embedding
            if isinstance(vector, str):
                vector = np.frombuffer(base64.b64decode(vector), dtype="<f4")
            assert np.allclose(vector, expected(tokens_of(tokenizer, text)), atol=1e-6), text
        count = sum(len(tokens_of(tokenizer, text)) for text in texts)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == count
    assert all(rows <= 4 for rows, _ in behind.batches), "no batch is larger than the model's"
    assert len(behind.batches) == 3 * 2


async def test_one_text_and_token_arrays(served: Maker, tokenizer: Path) -> None:
    client, _ = await served()
    ids = tokens_of(tokenizer, "one deadline and one tier")
    inputs: list[Any] = ["one deadline and one tier", ids, [ids], [ids, ids[:2]]]
    for given in inputs:
        answer = await client.embeddings.create(model="words", input=given)
        assert np.allclose(answer.data[0].embedding, expected(ids), atol=1e-6)
    assert np.allclose(answer.data[1].embedding, expected(ids[:2]), atol=1e-6)
    assert answer.usage.prompt_tokens == len(ids) + 2


async def test_fewer_dimensions_are_normalised_again(served: Maker, tokenizer: Path) -> None:
    client, _ = await served()
    answer = await client.embeddings.create(model="words", input="sunny", dimensions=7)
    assert np.allclose(answer.data[0].embedding, expected(tokens_of(tokenizer, "sunny"), 7), atol=1e-6)
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.embeddings.create(model="words", input="sunny", dimensions=WIDTH + 1)
    assert wrong.value.param == "dimensions"


REFUSED: list[tuple[dict[str, Any], str, str, str]] = [
    ({"input": ""}, "input", "parameter_wrong", "empty"),
    ({"input": [99999]}, "input", "parameter_wrong", "99999 is not a token"),
    ({"input": "sunny " * 40}, "input", "context_length_exceeded", "maximum context length is 24 tokens"),
    ({"extra_body": {"colour": 1}}, "colour", "unknown_parameter", "no parameter 'colour'"),
]


async def test_what_is_wrong_is_named_as_that_api_names_it(served: Maker) -> None:
    client, _ = await served()
    for changes, param, code, says in REFUSED:
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.embeddings.create(**{"model": "words", "input": "a", **changes})
        error = wrong.value
        assert (error.status_code, error.param, error.code, error.type) == (400, param, code, "invalid_request_error")
        assert says in error.message and isinstance(error.body, dict)
        assert error.body["reason"] == "parameter_wrong" and error.body["request_id"] == error.request_id


async def test_a_body_that_is_none_and_one_that_is_too_large(served: Maker) -> None:
    _, stack = await served()
    for body, status, reason in [
        (b"{", 400, "parameter_wrong"),
        (b'{"input": "a"}', 400, "parameter_wrong"),
        (b'{"model": "words", "input": "' + b"a" * (4 << 20) + b'"}', 413, "input_too_large"),
    ]:
        answer = await stack.client.post("/v1/embeddings", content=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["reason"], error["type"]) == (status, reason, "invalid_request_error")
    answer = await stack.client.post("/v1/embeddings", content=b"{}", headers={"content-encoding": "gzip"})
    assert answer.status_code == 415


async def test_all_inputs_together_are_bounded(served: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oriel_logic.openai.embeddings.MAX_TOTAL_TOKENS", 10)
    client, _ = await served()
    with pytest.raises(openai.BadRequestError, match="may have at most 10 tokens"):
        await client.embeddings.create(model="words", input=["sunny outside"] * 5)


async def test_long_inputs_are_cut_where_the_service_says_so(served: Maker, tokenizer: Path) -> None:
    client, _ = await served(ENCODER.replace("max_rows=4", "truncate=True"))
    text = "sunny outside " * 40
    answer = await client.embeddings.create(model="words", input=text)
    assert answer.usage.prompt_tokens == 24
    assert np.allclose(answer.data[0].embedding, expected(tokens_of(tokenizer, text)[:24]), atol=1e-6)


async def test_a_model_of_others_is_absent_in_the_same_words(served: Maker) -> None:
    client, stack = await served()

    async def refused(model: str, **headers: str) -> tuple[int, str, Any]:
        with pytest.raises(openai.NotFoundError) as error:
            await client.embeddings.create(model=model, input="a", extra_headers=headers)
        return error.value.status_code, error.value.message.replace(model, "X"), error.value.code

    others = {"x-oriel-models": "wor,sentences-*", "x-oriel-tenant": "acme"}
    assert await refused("words", **others) == await refused("nothing", **others)
    assert (await refused("words", **others))[2] == "model_not_found"
    assert await refused("tiny") == await refused("nothing"), "a model of another kind"
    mine = {"x-oriel-models": "w*", "x-oriel-tenant": "acme"}
    assert "did you mean 'words'?" in (await refused("wrods", **mine))[1]
    assert "words" not in (await refused("wrods", **others))[1]
    assert (await client.embeddings.create(model="words", input="a", extra_headers=mine)).data
    assert [each.id async for each in client.models.list(extra_headers=mine)] == ["words"]
    assert sorted([each.id async for each in client.models.list()]) == ["tiny", "words"]
    assert (await client.models.retrieve("words", extra_headers=mine)).id == "words"
    absent = []
    for name, headers in (("words", others), ("nothing", {}), ("no/thing", others)):
        with pytest.raises(openai.NotFoundError) as error:
            await client.models.retrieve(name, extra_headers=headers)
        absent.append((error.value.message.replace(name, "X"), error.value.code))
    assert len(set(absent)) == 1 and absent[0][1] == "model_not_found"


async def test_an_answer_says_where_its_time_went(served: Maker) -> None:
    _, stack = await served()
    answer = await stack.client.post("/v1/embeddings", json={"model": "words", "input": "a"})
    assert "logic-encode;dur=" in answer.headers["server-timing"] and "logic-infer" in answer.headers["server-timing"]
    assert int(answer.headers["x-oriel-cost-us"]) >= 250, "the model's cost and the worker's"


async def test_a_service_without_its_file_says_so_and_stops_no_other(served: Maker) -> None:
    client, stack = await served(ENCODER.replace("tiny/tokenizer.json", "nowhere.json"))
    with pytest.raises(openai.InternalServerError, match="cannot run") as error:
        await client.embeddings.create(model="words", input="a")
    assert error.value.status_code == 503 and isinstance(error.value.body, dict)
    assert error.value.body["reason"] == "service_broken"
    assert [each.id async for each in client.models.list()] == ["tiny"]
    (row,) = (await stack.client.get("/v1/services")).json()["services"]
    assert row["state"] == "broken" and "there is no tokenizer file nowhere.json" in row["problem"]


async def test_of_two_with_one_name_the_first_is_served(served: Maker) -> None:
    client, stack = await served(
        ENCODER + ENCODER.replace("words =", "more =").replace("max_tokens=24", "max_tokens=2")
    )
    assert (await client.embeddings.create(model="words", input="sunny outside")).data
    (row,) = (await stack.client.get("/v1/services")).json()["services"]
    assert "the name is taken by words.py" in row["problem"]


async def test_a_service_comes_changes_breaks_and_goes_while_the_server_runs(served: Maker, services: Any) -> None:
    client, stack = await served("nothing = 1")
    folder = services()

    async def change(text: str | None) -> set[str]:
        if text is None:
            (folder / "words.py").unlink()
        else:
            services(words=text)
        for _ in range(2):
            await stack.unit.updates.poll()
        await stack.unit.updates.settled()
        return {each.id async for each in client.models.list()}

    assert await change(ENCODER) == {"tiny", "words"}
    assert (await client.embeddings.create(model="words", input="a")).data
    assert await change(ENCODER.replace('"words"', '"phrases"')) == {"tiny", "phrases"}
    assert await change(ENCODER.replace("tiny/tokenizer.json", "nowhere.json")) == {"tiny", "phrases"}
    assert (await client.embeddings.create(model="phrases", input="a")).data, "what serves goes on serving"
    rows = (await stack.client.get("/v1/services")).json()["services"]
    assert ["no tokenizer file nowhere.json" in row["problem"] for row in rows] == [True]
    assert await change(None) == {"tiny"}
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model="phrases", input="a")
    assert len(stack.unit.updates.deployments) == 1, "no pool of processes is left over"


async def test_a_model_that_gives_something_else_is_blamed(served: Maker, behind: Behind, inference: Any) -> None:
    client, _ = await served()
    inference.run = lambda request: {"hidden": np.zeros((1, 7, 3, 2), np.float32)}
    with pytest.raises(openai.InternalServerError) as error:
        await client.embeddings.create(model="words", input="a")
    assert error.value.status_code == 502 and "not return an embedding" in error.value.message


async def test_time_that_is_over_is_a_504_that_names_the_stage(served: Maker, inference: Any) -> None:
    client, _ = await served()
    inference.hold = True
    with pytest.raises(openai.InternalServerError) as error:
        await client.embeddings.create(model="words", input="a", extra_headers={"x-request-timeout-ms": "3000"})
    assert error.value.status_code == 504 and isinstance(error.value.body, dict)
    assert error.value.body["stage"] == "infer" and error.value.type == "server_error"
