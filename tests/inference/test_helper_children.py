"""The processes that convert and check for the server."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["servers.large_json_child", "repository.check_child"])
def test_what_a_child_has_imported_is_not_walked_after_each_request(module: str) -> None:
    """A third of the time of the child for large JSON went to collections among what never ends."""
    program = f"import gc, sys\nfrom oriel_inference.{module} import main\nmain()\n"
    program += "print(gc.get_freeze_count(), file=sys.stderr)"
    arguments = ["4000000000", "1000"] if "json" in module else []
    done = subprocess.run([sys.executable, "-c", program, *arguments], input=b"", capture_output=True, check=True)
    assert int(done.stderr) > 5000
