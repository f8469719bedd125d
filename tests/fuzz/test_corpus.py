"""The rules of `targets` hold for every input of the corpus, and for random changes of them."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from . import fuzz_v2, mutate, targets

CORPUS = Path(__file__).resolve().parent / "corpus"
CHANGED = 600


# In a process of its own: servers that other tests keep in threads allocate as well, and may crash under tracemalloc.
PEAKS = """
import sys, tracemalloc
from pathlib import Path
from tests.fuzz import targets

for codec in sorted(targets.CODECS):
    targets.check(codec, b"")  # what is imported when first used is not the input's
    for path in sorted((Path(sys.argv[1]) / codec).iterdir()):
        data = path.read_bytes()
        tracemalloc.start()
        targets.check(codec, data)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < (1 << 20) + 64 * len(data), f"{codec}/{path.name}"
"""


def test_the_corpus_holds_and_nothing_takes_memory_it_has_no_bytes_for() -> None:
    path = os.pathsep.join([str(CORPUS.parents[2]), *sys.path])
    words = [sys.executable, "-c", PEAKS, str(CORPUS)]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("codec", sorted(targets.CODECS))
def test_changed_inputs_hold(codec: str) -> None:
    rng = random.Random(f"{codec} 1")
    pool = fuzz_v2.corpus(codec)
    for _ in range(CHANGED):
        data = mutate.mutate(codec, rng.choice(pool), pool, rng)
        try:
            targets.check(codec, data)
        except Exception as error:
            raise AssertionError(f"{codec}: kept as {fuzz_v2.keep(codec, data, 'broken').name}") from error


def test_the_rules_can_break(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A codec that lets something else escape is found, and the input that showed it is kept."""

    def decode(data: bytes) -> None:
        if b"\xff" in data:
            raise KeyError("escaped")

    monkeypatch.syspath_prepend(str(Path(fuzz_v2.__file__).parent))
    import targets as loaded

    monkeypatch.setitem(loaded.CODECS, "http", decode)
    monkeypatch.setattr(fuzz_v2, "CORPUS", tmp_path)
    (tmp_path / "http").mkdir()
    (tmp_path / "http" / "first").write_bytes(b"abc")
    assert fuzz_v2.search(["http"], seconds=0.2, seed=1) > 0
    assert any(
        path.name.startswith("keyerror-") and b"\xff" in path.read_bytes() for path in (tmp_path / "http").iterdir()
    )
    assert "http: KeyError" in capsys.readouterr().out
