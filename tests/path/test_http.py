"""A public HTTP client that has a key and an image, and knows nothing else."""

import base64
import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from stacks import EXAMPLES, key, picture

SERVICE = "/v1/services/digits"
PNG = {"content-type": "image/png"}


@pytest.mark.parametrize("digit", range(10))
def test_each_handwritten_digit_is_read(client: httpx.Client, digit: int) -> None:
    answer = client.post(SERVICE, content=picture(digit), headers={**key("gold"), **PNG})
    assert answer.status_code == 200 and answer.json()["label"] == digit and answer.json()["confidence"] > 0.5


@pytest.mark.parametrize("tier", ["gold", "silver", "bronze"])
def test_every_tier_is_served(client: httpx.Client, tier: str) -> None:
    answer = client.post(SERVICE, content=picture(7), headers={**key(tier), **PNG})
    assert answer.status_code == 200 and answer.json()["label"] == 7


def test_json_with_a_base64_image_is_read(client: httpx.Client) -> None:
    body = {"image": base64.b64encode(picture(3)).decode()}
    answer = client.post(SERVICE, json=body, headers=key("gold"))
    assert answer.status_code == 200 and answer.json()["label"] == 3


def test_an_answer_says_who_it_is_and_where_its_time_went(client: httpx.Client) -> None:
    answer = client.post(SERVICE, content=picture(7), headers={**key("gold"), **PNG})
    assert re.fullmatch(r"[\w.-]{8,128}", answer.headers["x-request-id"])
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-0[0-3]", answer.headers["traceresponse"])
    stages = dict(part.strip().split(";dur=") for part in answer.headers["server-timing"].split(","))
    assert len(stages) >= 4 and all(float(ms) >= 0 for ms in stages.values())


def test_the_json_request_of_the_readme_is_answered_with_7(client: httpx.Client) -> None:
    body = (EXAMPLES / "digits" / "7.v2.json").read_bytes()
    answer = client.post("/v2/models/digits/infer", content=body, headers=key("gold"))
    outputs = {output["name"]: output["data"] for output in answer.json()["outputs"]}
    assert outputs["label"] == [7]


def test_a_model_of_others_looks_like_one_that_is_not_there(client: httpx.Client) -> None:
    def told(model: str) -> tuple[int, str]:
        answer = client.get(f"/v2/models/{model}", headers={**key("silver"), "x-request-id": "same"})
        return answer.status_code, answer.text.replace(model, "X")

    assert told("mlp_single") == told("absent") and told("mlp_single")[0] == 404


def test_too_many_requests_are_429_with_when_to_come_back(client: httpx.Client) -> None:
    with ThreadPoolExecutor(12) as callers:  # one after the other they would be within the limit on a slow machine
        asked = [callers.submit(client.get, "/v2/models/digits", headers=key("bronze")) for _ in range(48)]
    answers = [each.result() for each in asked]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused, "48 requests at once are more than the demo's bronze tenant was promised (5, then 2 a second)"
    for answer in refused:
        assert int(answer.headers["retry-after"]) >= 1
        assert re.search(r"r=0\b", answer.headers["ratelimit"]) and "q=" in answer.headers["ratelimit-policy"]
        assert answer.json()["error"] and answer.json()["reason"]
