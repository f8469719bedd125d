"""Which tests run in one process, one after the other, when `make test` runs several processes at once."""

from ..conftest import together


def test_whole_stacks_run_one_after_the_other() -> None:
    names = {together(f"tests/path/{file}.py::test_{n}") for file in ("test_life", "test_http") for n in "ab"}
    assert len(names) == 1


def test_tests_with_a_fixture_made_once_stay_together_and_others_do_not() -> None:
    hostile, wire = "tests/inference/test_hostile.py", "tests/wire/test_control.py"
    assert together(f"{hostile}::test_http[x::y]") == together(f"{hostile}::test_grpc") == hostile
    assert together(f"{wire}::test_a") != together(f"{wire}::test_b")
