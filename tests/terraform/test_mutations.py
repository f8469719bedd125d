"""Every mistake of mutations.py is put into a copy of terraform/, and the test that is named has to turn red."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from .harness import HERE
from .mutations import MUTATIONS, table


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.name.replace(" ", "-"))
def test_is_caught(mutation, tree, terraform, tmp_path, record_property):
    copy = tmp_path / "terraform"
    shutil.copytree(tree, copy, ignore=shutil.ignore_patterns(".terraform*"))
    mutation.apply(copy)
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-m", "", "-x", "-q", "-rfE", "--tb=line", "--no-header",
            "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={tmp_path / 'inner'}",
            str(HERE / mutation.caught_by),
        ],
        cwd=HERE.parents[1],
        env=os.environ | {"ORIEL_TERRAFORM_TREE": str(copy)},
        capture_output=True,
        text=True,
        timeout=200,
    )  # fmt: skip
    red = re.findall(r"^(?:FAILED|ERROR) \S*?(test_\w+\.py::\w+)", done.stdout, re.M)
    # 1: tests failed. A test that is not there, or files that do not even import, end otherwise.
    assert done.returncode == 1, f"{mutation.name}: nobody noticed\n{done.stdout[-3000:]}{done.stderr[-2000:]}"
    assert red == [mutation.caught_by.partition("[")[0]]
    record_property("caught_by", red[0])


def test_there_are_enough_of_them_and_the_table_is_whole():
    assert len(MUTATIONS) >= 16
    assert len({each.name for each in MUTATIONS}) == len(MUTATIONS)
    assert table() in (HERE / "README.md").read_text()
