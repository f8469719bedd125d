"""Every mistake of mutations.py is put into a copy of terraform/, and the test that is named has to turn red."""

import multiprocessing
import re
import shutil

import pytest

from .harness import HERE
from .mutations import MUTATIONS, run_test, table

# A process that has imported what the tests import, and does nothing else: each mistake is judged in a copy of it.
JUDGES = multiprocessing.get_context("forkserver")
JUDGES.set_forkserver_preload(["pytest", "pytest_asyncio.plugin", "hypothesis", "hcl2", "oriel_gateway.app", "uvloop"])


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.name.replace(" ", "-"))
def test_is_caught(mutation, tree, terraform, tmp_path, record_property):
    copy = tmp_path / "terraform"
    shutil.copytree(tree, copy, ignore=shutil.ignore_patterns(".terraform*"))
    mutation.apply(copy)
    printed = tmp_path / "printed"
    words = [
        "-m", "", "-x", "-q", "-rfE", "--tb=line", "--no-header",
        "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={tmp_path / 'inner'}",
        "-W", "ignore::pytest.PytestAssertRewriteWarning",  # plug-ins are imported already
        str(HERE / mutation.caught_by),
    ]  # fmt: skip
    judge = JUDGES.Process(target=run_test, args=(words, HERE.parents[1], copy, printed))
    judge.start()
    judge.join(200)
    if judge.exitcode is None:
        judge.kill()
    output = printed.read_text()
    red = re.findall(r"^(?:FAILED|ERROR) \S*?(test_\w+\.py::\w+)", output, re.M)
    # 1: tests failed. A test that is not there, or files that do not even import, end otherwise.
    assert judge.exitcode == 1, f"{mutation.name}: nobody noticed\n{output[-3000:]}"
    assert red == [mutation.caught_by.partition("[")[0]]
    record_property("caught_by", red[0])


def test_there_are_enough_of_them_and_the_table_is_whole():
    assert len(MUTATIONS) >= 16
    assert len({each.name for each in MUTATIONS}) == len(MUTATIONS)
    assert table() in (HERE / "README.md").read_text()
