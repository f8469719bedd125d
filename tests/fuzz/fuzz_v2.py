"""Byte-level fuzzing of the v2 codecs, HTTP/1.1, HPACK and HTTP/2: `python tests/fuzz/fuzz_v2.py --seconds 60`.

Starts from the corpus, changes inputs at random, and keeps those that bring a refusal or a kind of message not seen
before. What breaks a rule of `targets` is written into the corpus: fix the codec and leave the file there, the test
replays it. With `--atheris` (pip install atheris; not among our requirements) libFuzzer's coverage guides the search.
"""

import argparse
import hashlib
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

CORPUS = Path(__file__).resolve().parent / "corpus"
CODECS = ("http", "grpc", "config", "http1", "hpack", "http2")
MAX_POOL = 4000
LATE_S = 10.0


def corpus(codec: str) -> list[bytes]:
    """Return the inputs that are kept for a codec, ordered by name."""
    return [path.read_bytes() for path in sorted((CORPUS / codec).iterdir())]


def keep(codec: str, data: bytes, kind: str) -> Path:
    """Write an input into the corpus; its file name says what the codec did with it."""
    path = CORPUS / codec / f"{kind}-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    return path


def kind_of(codec: str, data: bytes, said: str) -> str:
    """Return what the codec did with an input, without the values in it. Of two inputs of one kind only one is kept."""
    words = re.sub(r"'[^']*'|\"[^\"]*\"|\d+|\[[^\]]*\]", "", said)[:80]
    return words or f"{len(data).bit_length()}:{len(set(data)) // 16}"


def cases(codec: str, rng: random.Random, found: dict[str, bytes]) -> Iterator[bytes]:
    """Yield inputs without end, by changing those of the corpus and of `found`."""
    from mutate import mutate

    first = corpus(codec)
    while True:
        pool = [*first, *found.values()]
        for _ in range(200):
            # What is kept reaches deeper than most of what was found.
            yield mutate(codec, rng.choice(first if rng.random() < 0.5 else pool), pool, rng)


def search(codecs: list[str], seconds: float, seed: int) -> int:
    """Try inputs for `seconds`; returns the number of broken rules."""
    from targets import Broken, check

    def late(*_: object) -> None:
        raise Broken(f"takes more than {LATE_S:g} s")

    signal.signal(signal.SIGALRM, late)
    rng = random.Random(seed)
    found: dict[str, dict[str, bytes]] = {codec: {} for codec in codecs}
    streams = {codec: cases(codec, rng, found[codec]) for codec in codecs}
    for codec in codecs:
        check(codec, b"")  # what is imported when first used is not an input's time
    tried, broken, slowest, started = 0, 0, (0.0, "", 0), time.monotonic()
    shown = started
    while (now := time.monotonic()) < started + seconds:
        if now >= shown + 5.0:
            shown = now
            kinds = sum(map(len, found.values()))
            print(f"{now - started:4.0f} s  {tried} inputs, {kinds} kinds, {broken} broken", flush=True)
        for codec in codecs:
            data = next(streams[codec])
            began = time.perf_counter()
            signal.setitimer(signal.ITIMER_REAL, LATE_S)
            try:
                said = check(codec, data)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # whatever escapes is what is looked for
                broken += 1
                name = "broken" if isinstance(error, Broken) else type(error).__name__.lower()
                said = f"{name} {error}"
                # One input of a kind is enough to fix it.
                if kind_of(codec, data, said) not in found[codec]:
                    path = keep(codec, data, name)
                    print(f"{codec}: {type(error).__name__}: {str(error)[:300]!r}\n  kept as {path.name}")
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            took = time.perf_counter() - began
            tried += 1
            if took > slowest[0]:
                slowest = (took, codec, len(data))
            if len(found[codec]) < MAX_POOL:
                found[codec].setdefault(kind_of(codec, data, said), data)
    print(
        f"{tried} inputs in {seconds:g} s, {broken} broke a rule; slowest {slowest[0] * 1e3:.1f} ms "
        f"({slowest[1]}, {slowest[2]} bytes)"
    )
    return broken


def with_atheris(codec: str, words: list[str]) -> None:
    """Run under atheris; libFuzzer's own flags follow `--`. Never returns."""
    import atheris

    with atheris.instrument_imports(include=["oriel_wire", "oriel_inference"]):
        from targets import check

    # What only covers more is for this run; what breaks a rule goes into the corpus.
    scratch = tempfile.mkdtemp(prefix="fuzz-")
    folders = [scratch, str(CORPUS / codec), f"-artifact_prefix={CORPUS / codec}/broken-"]
    atheris.Setup([sys.argv[0], *folders, *words], lambda data: check(codec, data) and None)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="of the random changes (printed)")
    parser.add_argument("--codec", choices=CODECS, action="append", help="repeatable; default all")
    parser.add_argument("--atheris", action="store_true", help="search by coverage; one --codec")
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    codecs = args.codec or list(CODECS)
    if args.atheris:
        with_atheris(codecs[0], args.rest)
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(2**32)
    print(f"seed {seed}", flush=True)
    return 1 if search(codecs, args.seconds, seed) else 0


if __name__ == "__main__":
    sys.exit(main())
