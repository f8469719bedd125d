"""The build that runs names itself, in the checkout and in the installed wheel."""

import os

from oriel_wire import distribution


def test_the_build_is_compiled_exactly_where_the_installed_wheel_is_tested() -> None:
    """`make test SUITE=compiled` runs this against the wheel."""
    compiled = os.environ.get("ORIEL_TEST_COMPILED") == "1"
    assert distribution.is_compiled() is compiled
    assert distribution.build() == ("compiled" if compiled else "pure Python")
