"""R27: another tenant's resources look absent: the answer and its time are those of a resource that does not exist."""

from collections.abc import Callable, Iterable
from math import sqrt
from time import perf_counter_ns

import pytest

from oriel_gateway.core import Gateway
from oriel_gateway.errors import Refused
from oriel_gateway.limits import EmbeddedLimiter
from oriel_policies.documents import compile_documents
from oriel_wire.observe.trace import ListSink

from .stack import BRONZE, Client, digest, documents, gateway, upstream

ROUNDS = 8
MODELS, SERVICES = ([f"secret-{kind}-{n}" for n in range(ROUNDS)] for kind in ("model", "service"))
OTHER = f"""
[tenants.other]
tier = "gold"
models = {MODELS}
services = {SERVICES}
keys = [{{ sha256 = "{digest("other")}" }}]
"""
SAMPLES = 400


def z_of(first: list[int], second: list[int]) -> float:
    """Return the z score of a Mann-Whitney U test: how far apart the ranks of the two samples are, in standard
    deviations.
    """
    ranked = sorted((value, mine) for mine, values in ((True, first), (False, second)) for value in values)
    ranks, i = 0.0, 0
    while i < len(ranked):
        j = i
        while j < len(ranked) and ranked[j][0] == ranked[i][0]:
            j += 1
        ranks += (i + j + 1) / 2 * sum(mine for _, mine in ranked[i:j])
        i = j
    n, m = len(first), len(second)
    return (ranks - n * (n + m + 1) / 2) / sqrt(n * m * (n + m + 1) / 12)


def told_apart(pairs: Iterable[tuple[Callable[[], object], Callable[[], object]]]) -> bool:
    """Whether the two calls of every pair take different times, in the same direction, by more than noise.

    400 alternating samples of each call are compared. A leak shows in every pair; a single pair may differ by chance,
    because its names hash to other slots of a table.
    """
    sides = set()
    for pair in pairs:
        samples: tuple[list[int], list[int]] = ([], [])
        for number in range(2 * SAMPLES):
            # Alternating, in changing order, so that other work of the machine affects both sides alike.
            side = number % 2 if number % 4 < 2 else 1 - number % 2
            began = perf_counter_ns()
            pair[side]()
            samples[side].append(perf_counter_ns() - began)
        z = z_of(*samples)
        sides.add(z > 0.0)
        if abs(z) < 4.0 or len(sides) > 1:
            return False
    return True


@pytest.mark.parametrize(
    "path", ["/v2/models/{}", "/v2/models/{}/infer", "/v1/services/{}", "/v2/models/{}/versions/7/infer"]
)
async def test_anothers_model_takes_as_long_as_none(path: str) -> None:
    core = Gateway(compile_documents(documents([1], extra=OTHER)), limiter=EmbeddedLimiter(), sink=ListSink())
    tenant = core.callers.of([("x-api-key", BRONZE)]).tenant

    def ask(name: str) -> Callable[[], None]:
        target = path.format(name)
        line = f"POST {target} HTTP/1.1".encode()

        def asking() -> None:
            try:
                core.targets.of_line(tenant, line, "POST", target, "")
            except Refused:
                pass

        return asking

    # Names of the same length: a longer name takes longer, whether it exists or not.
    names = SERVICES if "services" in path else MODELS
    assert not told_apart((ask(name), ask(name.replace("secret", "absent"))) for name in names)


async def test_an_unknown_key_takes_as_long_as_an_expired_one() -> None:
    core = Gateway(compile_documents(documents([1], extra=OTHER)), limiter=EmbeddedLimiter(), sink=ListSink())

    def ask(key: str) -> Callable[[], None]:
        def asking() -> None:
            try:
                core.callers.of([("x-api-key", key)])
            except Refused:
                pass

        return asking

    assert not told_apart((ask(f"one {n}"), ask(f"two {n}")) for n in range(ROUNDS))


def test_the_judge_can_tell_what_differs() -> None:
    assert told_apart([(lambda: sum(range(100)), lambda: sum(range(200)))] * ROUNDS)


async def test_anothers_model_is_answered_in_the_same_words() -> None:
    async with upstream() as up, gateway(documents([up.port], extra=OTHER)) as (port, _), Client(port) as client:
        for path in ("/v2/models/{}/infer", "/v2/models/{}", "/v1/services/{}"):
            answers = []
            for name in ("secret-model-0", "absent-model-0"):
                name = name.replace("model", "service") if "services" in path else name
                reply = await client.ask(path.format(name), key=BRONZE, headers="x-request-id: same\r\n")
                headers = {k: v for k, v in reply.headers.items() if k not in ("traceresponse", "server-timing")}
                answers.append((reply.status, reply.body.replace(name.encode(), b"NAME"), headers))
            assert answers[0] == answers[1] and answers[0][0] == 404
        assert not up.seen


async def test_a_near_name_is_one_of_the_tenants_own() -> None:
    mine = f"""
[tenants.mine]
tier = "gold"
models = ["digits", "team-*"]
services = ["sentiment"]
keys = [{{ sha256 = "{digest("mine")}" }}]
"""
    async with upstream() as up, gateway(documents([up.port], extra=OTHER + mine)) as (port, _), Client(port) as client:
        for path, near in (
            ("/v2/models/digist/infer", b"did you mean 'digits'?"),
            ("/v1/services/sentimnet", b"did you mean 'sentiment'?"),
            ("/v2/models/secret-model-x/infer", b""),
            ("/v1/services/secret-service-x", b""),
            ("/v1/services/digist", b""),
        ):
            answer = await client.ask(path, key="mine")
            assert answer.status == 404 and near in answer.body and (near != b"" or b"did you mean" not in answer.body)
        assert not up.seen
