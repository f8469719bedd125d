"""Which tests run in one process, one after the other, when `make test` runs several processes at once."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ..conftest import Run, together


def test_whole_stacks_run_one_after_the_other() -> None:
    names = {together(f"tests/path/{file}.py::test_{n}") for file in ("test_trace", "test_http") for n in "ab"}
    assert len(names) == 1


def test_tests_with_a_fixture_made_once_and_rows_of_one_table_stay_together_and_others_do_not() -> None:
    hostile, wire = "tests/inference/test_hostile.py", "tests/wire/test_control.py"
    assert together(f"{hostile}::test_http[x::y]") == together(f"{hostile}::test_grpc") == hostile
    assert together(f"{wire}::test_a[1]") == together(f"{wire}::test_a[2]") != together(f"{wire}::test_b[1]")


def test_what_a_run_makes_once_is_made_by_the_first_that_asks(tmp_path: Path) -> None:
    made: list[int] = []

    def make() -> dict[str, int]:
        made.append(1)
        return {"port": len(made)}

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: Run(tmp_path, os.getpid()).once("server", make), range(8)))
    assert found == [{"port": 1}] * 8 and made == [1]


def test_what_could_not_be_made_is_tried_by_the_next_that_asks(tmp_path: Path) -> None:
    run = Run(tmp_path, os.getpid())
    with pytest.raises(ZeroDivisionError):
        run.once("server", lambda: 1 // 0)
    assert run.once("server", lambda: 1) == 1
