"""Hot update, versions side by side and environments of their own, through a running unit."""

import asyncio
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from ..waiting import pipe_gate, until

GOOD = """
    from oriel_logic import service
    from pathlib import Path
    import helper

    def shout(text): return text.upper()

    @service
    async def echo(request, models, ctx):
        return [{0}, helper.WHO, await ctx.run(shout, request.text())]
"""
SLOW = """
    import asyncio
    from oriel_logic import service
    @service
    async def echo(request, models, ctx):
        with open(request.text(), "w") as gate:
            gate.write("here")
        with open(request.text() + ".go", "rb", 0) as gate:
            await asyncio.to_thread(gate.read, 1)
        return 1
"""


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


async def turns(logic: Any, count: int = 2) -> None:
    """Look at the folders so often, and wait for what that began."""
    for _ in range(count):
        await logic.unit.updates.poll()
    await logic.unit.updates.settled()


async def row(logic: Any, name: str) -> dict[str, Any]:
    found: dict[str, Any] = (await logic.client.get(f"/v1/services/{name}")).json()
    return found


async def test_a_changed_file_takes_over_without_a_failed_request(stack: Any, services: Any) -> None:
    folder = services(echo=GOOD.format(1), helper="WHO = 'a'")
    logic = await stack(folder)
    assert (await logic.post("echo", b"x")).json() == [1, "a", "X"]
    stop = asyncio.Event()
    failures: list[Any] = []
    seen: set[int] = set()

    async def keep_calling() -> None:
        while not stop.is_set():
            answer = await logic.post("echo", b"x")
            if answer.status_code != 200:
                failures.append(answer.text)
            else:
                seen.add(answer.json()[0])

    caller = asyncio.create_task(keep_calling())
    write(folder / "echo.py", GOOD.format(2))
    await turns(logic)
    write(folder / "helper.py", "WHO = 'b'")
    await turns(logic)
    stop.set()
    await caller
    assert failures == [] and seen == {1, 2}
    answer = await logic.post("echo", b"x")
    assert answer.json() == [2, "b", "X"] and answer.headers["x-oriel-service-version"] == "1"
    (found,) = (await logic.client.get("/v1/services")).json()["services"]
    assert (found["state"], found["release"]) == ("ready", 3) and "update" not in found
    assert len([name for name in sys.modules if name.startswith("oriel_services.echo@")]) <= 3, "the old ones are gone"


async def test_what_is_under_way_ends_on_the_release_it_began_on(stack: Any, services: Any, tmp_path: Path) -> None:
    folder = services(echo=SLOW)
    logic = await stack(folder)
    gate = tmp_path / "gate"
    with pipe_gate(tmp_path / "gate.go") as finish:
        slow = asyncio.create_task(logic.post("echo", str(gate).encode()))
        await until(lambda: gate.exists())
        write(folder / "echo.py", GOOD.format(2))
        write(folder / "helper.py", "WHO = 'a'")
        for _ in range(2):
            await logic.unit.updates.poll()

        async def is_replaced() -> bool:
            return bool((await row(logic, "echo"))["release"] == 2)

        await until(is_replaced)
        assert (await logic.post("echo", b"x")).json()[0] == 2
        assert not slow.done() and len(logic.unit.updates.deployments) == 2
        finish()
        assert (await slow).json() == 1
        await logic.unit.updates.settled()
        assert (await logic.post("echo", b"x")).json()[0] == 2


BROKEN = [
    ("def broken(:\n", "line 1: SyntaxError"),
    ("import os\nos._exit(3)\n", "its process ended while it was imported or set up"),
    ("x = 1\n", "it has no service: put @service on a function or a class"),
    (
        "from oriel_logic import service\n@service\nclass echo:\n"
        "    def setup(self): raise OSError('no disk')\n    def predict(self, request): return 1\n",
        "its setup failed: line 4: OSError: no disk",
    ),
    (
        "from oriel_logic import service\n@service(sample='hello')\nasync def echo(request, models, ctx):\n"
        "    return 1 / 0\n",
        "its self-test with the sample of @service failed: line 4: ZeroDivisionError: division by zero",
    ),
    (
        "from oriel_logic import service\n@service(sample='hello')\ndef echo(request):\n    return 1 / 0\n",
        "ZeroDivisionError: division by zero",
    ),
    (
        "from oriel_logic import service\n@service(sample='hello')\nasync def echo(request, models, ctx):\n"
        "    await models.infer('nope', {'x': [1]})\n",
        "its self-test with the sample of @service failed: model 'nope'",
    ),
]


async def test_a_broken_upload_never_takes_a_serving_version_down(
    stack: Any, services: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = services(echo=GOOD.format(1), helper="WHO = 'a'")
    logic = await stack(folder)
    for source, problem in BROKEN:
        caplog.clear()
        write(folder / "echo.py", source)
        await turns(logic)
        found = await row(logic, "echo")
        assert (found["state"], found["release"]) == ("ready", 1)
        assert problem in found["update"]["problem"], source
        assert problem in caplog.text and "release 1 goes on serving" in caplog.text
        assert (await logic.post("echo", b"x")).json() == [1, "a", "X"], source
        assert len(logic.unit.updates.deployments) == 1
    listed = (await logic.client.get("/v1/services")).json()["services"]
    assert [each["name"] for each in listed] == ["echo"]
    write(folder / "echo.py", GOOD.format(2))
    await turns(logic)
    assert (await logic.post("echo", b"x")).json()[0] == 2
    assert "update" not in await row(logic, "echo")


async def test_what_takes_too_long_to_set_up_fails(stack: Any, services: Any) -> None:
    folder = services()
    source = "import time\nfrom oriel_logic import service\ntime.sleep({0})\n@service\ndef f(request): return 1\n"
    write(folder / "slow/handler.py", source.format(0))
    logic = await stack(folder)
    write(folder / "slow/pyproject.toml", "[tool.oriel]\nsetup_timeout_s = 0.5\n")
    write(folder / "slow/handler.py", source.format(60))
    await turns(logic)
    found = await row(logic, "slow")
    assert found["state"] == "ready" and "took longer than 0.5 s" in found["update"]["problem"]
    assert (await logic.post("slow", b"x")).json() == 1


async def test_services_come_and_go(stack: Any, services: Any) -> None:
    folder = services(echo=GOOD.format(1), helper="WHO = 'a'")
    logic = await stack(folder)
    write(folder / "later/handler.py", "from oriel_logic import service\n@service\ndef f(request): return 5\n")
    write(folder / "later/sample.json", '{"any": "thing"}')
    assert (await logic.post("later")).status_code == 404
    await turns(logic)
    assert (await logic.post("later")).json() == 5
    (folder / "echo.py").unlink()
    await turns(logic)
    assert (await logic.post("echo")).status_code == 404
    for name in ("handler.py", "sample.json"):
        (folder / "later" / name).unlink()
    await turns(logic)
    assert (await logic.client.get("/v1/services")).json() == {"services": []}
    assert logic.unit.updates.deployments == []


async def test_a_service_that_reads_a_file_while_it_comes_is_updated(stack: Any, services: Any) -> None:
    """It was set up in a worker first, which cannot run it, and that was taken for a fault of the server."""
    source = """
        from oriel_logic import Upload, service
        @service(sample=b"abc", sample_type="application/octet-stream")
        async def size(file: Upload) -> int:
            return {0} * len(await file.read())
    """
    folder = services(size=source.format(1))
    logic = await stack(folder)
    write(folder / "size.py", source.format(2))
    await turns(logic)
    assert (await logic.post("size", b"abc")).json() == 6


async def test_a_folder_may_set_the_limits_of_its_service(stack: Any, services: Any) -> None:
    folder = services()
    source = "from oriel_logic import service\n@service(max_body_bytes=5)\ndef f(request): return 1\n"
    write(folder / "small/handler.py", source)
    logic = await stack(folder)
    assert [(await logic.post("small", b"x" * size)).status_code for size in (5, 6)] == [200, 413]
    for turn, extra in enumerate(("", "workers = 1\n"), 2):  # shared processes, own ones
        write(folder / "small/pyproject.toml", f"[tool.oriel]\nmax_body_bytes = 3\n{extra}")
        await turns(logic)
        assert (await row(logic, "small"))["release"] == turn
        assert [(await logic.post("small", b"x" * size)).status_code for size in (3, 4)] == [200, 413]
    again = await stack(folder)
    await again.unit.updates.settled()
    assert (await again.post("small", b"x" * 4)).status_code == 413


async def test_a_name_that_is_taken_stays_where_it_is(stack: Any, services: Any) -> None:
    source = "from oriel_logic import service\n@service(name='same')\ndef f(request): return {0}\n"
    folder = services(a=source.format(1))
    logic = await stack(folder)
    write(folder / "b.py", source.format(2))
    await turns(logic)
    assert (await logic.post("same")).json() == 1
    listed = (await logic.client.get("/v1/services")).json()["services"]
    assert [(each["file"], each.get("problem")) for each in listed] == [
        ("a.py", None),
        ("b.py", "the name 'same' is taken by a.py"),
    ]


async def test_versions_side_by_side_with_weights(stack: Any, services: Any) -> None:
    folder = services()
    source = "from oriel_logic import service\nimport prep\n@service\ndef f(request): return prep.N\n"
    for number in ("1", "2"):
        write(folder / f"ranker/{number}/handler.py", source)
        write(folder / f"ranker/{number}/prep.py", f"N = {number}")
    weights = write(folder / "ranker/pyproject.toml", '[tool.oriel]\nweights = {{ "1" = {0}, "2" = {1} }}\n')
    template = weights.read_text()
    weights.write_text(template.format(1, 0))
    logic = await stack(folder)
    await logic.unit.updates.settled()
    assert {(await logic.post("ranker", x_request_id=f"r{each}")).json() for each in range(20)} == {1}
    answer = await logic.post("ranker/versions/2")
    assert (answer.json(), answer.headers["x-oriel-service-version"]) == (2, "2")
    missing = await logic.post("ranker/versions/3")
    assert missing.status_code == 404 and "it has 1, 2" in missing.json()["error"]["message"]
    releases = logic.unit.registry.releases()
    weights.write_text(template.format(50, 50))
    await turns(logic)
    for each in range(20):
        first, again = [await logic.post("ranker", x_request_id=f"r{each}") for _ in range(2)]
        assert first.json() == again.json() == int(first.headers["x-oriel-service-version"])
    found = {(await logic.post("ranker", x_request_id=f"r{each}")).json() for each in range(20)}
    assert found == {1, 2}
    assert logic.unit.registry.releases() == releases, "nothing was set up anew"
    listed = await row(logic, "ranker")
    assert [(each["version"], each["weight"]) for each in listed["versions"]] == [("1", 50), ("2", 50)]


async def test_a_sample_that_needs_a_model_is_tried_again_when_the_model_may_be_there(
    stack: Any, services: Any, inference: Any
) -> None:
    folder = services()
    logic = await stack(folder)
    logic.unit.updates.retry_min_s = 0.0
    write(
        folder / "doubled.py",
        """
        from oriel_logic import service
        @service(sample=[[1.0, 2.0]])
        async def doubled(request, models, ctx):
            return (await models.infer("double", {"x": request.json()}))["y"]
        """,
    )
    facts = inference.models.pop("double")
    await turns(logic)
    assert "model 'double'" in (await row(logic, "doubled"))["problem"]
    await turns(logic, 1)
    assert (await row(logic, "doubled"))["state"] == "broken"
    inference.models["double"] = facts
    await turns(logic, 1)
    assert (await logic.post("doubled", b"[[1, 2]]")).json() == [[2.0, 4.0]]


async def test_a_folder_that_cannot_be_read_is_no_news(
    stack: Any, services: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = services(echo=GOOD.format(1), helper="WHO = 'a'")
    logic = await stack(folder)
    away = folder.rename(folder.with_name("away"))
    await turns(logic, 3)
    assert (await logic.post("echo", b"x")).status_code == 200
    assert caplog.text.count("a folder cannot be read") == 1
    away.rename(folder)
    await turns(logic, 3)
    assert (await row(logic, "echo"))["release"] == 1


async def test_what_does_not_end_in_time_is_cut(
    stack: Any, services: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = "import os, time\nfrom oriel_logic import service\n@service\ndef echo(request):\n    {0}\n"
    wait = "open(request.text(), 'w').close()\n    time.sleep(60)"
    folder = services(echo=source.format(wait))
    logic = await stack(folder, release_drain_s=0.05)
    slow = asyncio.create_task(logic.post("echo", str(tmp_path / "gate").encode()))
    await until(lambda: (tmp_path / "gate").exists())
    write(folder / "echo.py", source.format("return 2"))
    await turns(logic)
    answer = await slow
    assert answer.json()["error"]["reason"] == "worker_died"
    assert "1 request(s) of a replaced release did not end in time" in caplog.text
    assert (await logic.post("echo")).json() == 2


async def test_a_sample_that_gets_no_answer_in_time_fails(stack: Any, services: Any) -> None:
    folder = services()
    logic = await stack(folder, sample_timeout_s=0.05)
    source = """
        import asyncio
        from oriel_logic import service
        @service(sample=1)
        async def echo(request, models, ctx):
            await asyncio.Event().wait()
    """
    write(folder / "echo.py", source)
    await turns(logic)
    problem = (await row(logic, "echo"))["problem"]
    assert problem.startswith("its self-test with the sample of @service failed: ") and "0.05 s" in problem


async def test_two_are_set_up_at_a_time(stack: Any, services: Any, tmp_path: Path) -> None:
    folder = services()
    logic = await stack(folder)
    for name in "abcd":
        source = f"""
            from oriel_logic import service
            open({str(tmp_path / name)!r}, "w").close()
            with open({str(tmp_path / "gate")!r}, "rb", 0) as gate: gate.read(1)
            @service
            def f(request): return 1
        """
        write(folder / f"{name}.py", source)
    with pipe_gate(tmp_path / "gate", passes=1000) as set_up:
        for _ in range(3):
            await logic.unit.updates.poll()
        await until(lambda: sum((tmp_path / name).exists() for name in "abcd") >= 2)
        assert logic.unit.updates.states() == {"serving": 0, "draining": 0, "setting_up": 4, "failed": 0}
        assert sum((tmp_path / name).exists() for name in "abcd") == 2
        set_up()
        await logic.unit.updates.settled()
    assert logic.unit.updates.states()["serving"] == 4


async def test_a_service_that_cannot_be_read_goes_on_and_so_do_the_others(
    stack: Any, services: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = "from oriel_logic import service\n@service\ndef f(request): return {0}\n"
    folder = services(other=source.format(1))
    for version in ("1", "2"):
        write(folder / f"hidden/{version}/handler.py", source.format(version))
    write(folder / "hidden/pyproject.toml", '[tool.oriel]\nweights = { "1" = 1 }\n')
    logic = await stack(folder)
    await logic.unit.updates.settled()
    real = Path.iterdir

    def iterdir(path: Path) -> Any:
        if path.name == "hidden":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    write(folder / "other.py", source.format(2))
    await turns(logic, 3)
    assert (await logic.post("other")).json() == 2
    assert (await logic.post("hidden")).json() == 1 and (await logic.post("hidden/versions/2")).json() == 2
    assert caplog.text.count("hidden cannot be read (Permission denied)") == 1
    monkeypatch.undo()
    await turns(logic, 3)
    assert (await row(logic, "hidden"))["versions"][0]["release"] == 1


DEADLY = """
    import os
    from oriel_logic import service

    @service(sample={"text": "x"})
    class Echo:
        def setup(self):
            os._exit(1)

        async def predict(self, text: str) -> str:
            return text
"""


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (DEADLY, "its process ended while it was imported or set up"),
        (DEADLY.replace("os._exit(1)", "pass").replace("return text", "os._exit(1)"), "failed: it ended its process"),
        (DEADLY.replace("os._exit(1)", "pass").replace("return text", "raise KeyboardInterrupt"), "KeyboardInterrupt"),
    ],
)
async def test_what_takes_its_process_down_takes_down_its_own(
    stack: Any, services: Any, broken: str, said: str
) -> None:
    """It was run in the logic process at once, and ended the server."""
    folder = services(echo=GOOD.format(1), helper="WHO = 'a'")
    logic = await stack(folder)
    write(folder / "echo.py", broken)
    await turns(logic)
    assert (await logic.post("echo", b"x")).json() == [1, "a", "X"]
    assert said in str(await row(logic, "echo"))
    write(folder / "echo.py", DEADLY.replace("os._exit(1)", "pass"))
    await turns(logic)
    assert (await logic.post("echo", b'{"text": "x"}', content_type="application/json")).text == "x"


async def test_a_newer_save_does_not_wait_for_one_that_hangs(stack: Any, services: Any) -> None:
    folder = services(echo=GOOD.format(1), helper="WHO = 'a'")
    logic = await stack(folder)
    write(folder / "echo.py", "while True: pass")
    for _ in range(2):
        await logic.unit.updates.poll()
    assert logic.unit.updates.states()["setting_up"] == 1
    write(folder / "echo.py", GOOD.format(2))
    await turns(logic)
    assert (await logic.post("echo", b"x")).json() == [2, "a", "X"]
    write(folder / "echo.py", "while True: pass  # again")
    for _ in range(2):
        await logic.unit.updates.poll()
    (folder / "echo.py").unlink()
    await turns(logic, 3)
    assert (await logic.post("echo", b"x")).status_code in (404, 503)


async def test_a_sample_that_never_ends_holds_nobody_up(stack: Any, services: Any) -> None:
    """It was tried on the loop that serves."""
    folder = services(echo=GOOD.format(1), helper="WHO = 'a'")
    logic = await stack(folder, sample_timeout_s=1.0)
    write(folder / "echo.py", DEADLY.replace("os._exit(1)", "pass").replace("return text", "while True: pass"))
    await turns(logic)
    assert (await logic.post("echo", b"x")).json() == [1, "a", "X"]
    assert "self-test with the sample of @service failed" in str(await row(logic, "echo"))


async def test_a_handler_that_is_no_file_any_more_goes_on_serving(stack: Any, services: Any) -> None:
    folder = services()
    source = "from oriel_logic import service\n@service\ndef f(request): return {0}\n"
    handler = write(folder / "good/handler.py", source.format(1))
    logic = await stack(folder)
    handler.unlink()
    os.mkfifo(handler)
    await turns(logic, 3)
    assert (await logic.post("good")).json() == 1
    found = await row(logic, "good")
    assert "has to be a regular file" in found["update"]["problem"], found
    handler.unlink()
    write(handler, source.format(2))
    await turns(logic)
    assert (await logic.post("good")).json() == 2 and "update" not in await row(logic, "good")


async def test_a_name_that_cannot_be_said_breaks_no_answer(stack: Any, services: Any) -> None:
    folder = services(echo=GOOD.format(1), helper="WHO = 'a'")
    logic = await stack(folder)
    source = "from oriel_logic import service\n@service\ndef f(request): return 1\n"
    write(folder / os.fsdecode(b"b\xff.py"), source)
    write(folder / "raises.py", "raise ValueError('\\udcff')\n")
    await turns(logic)
    listed = (await logic.client.get("/v1/services")).json()["services"]
    problems = {each["name"]: each.get("problem", "") for each in listed}
    assert problems == {
        "b\ufffd": "its path is not UTF-8: rename it",
        "echo": "",
        "raises": "line 1: ValueError: \\udcff",
    }
