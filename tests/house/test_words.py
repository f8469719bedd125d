"""Words that this project coined, in code, documentation, metrics help and error texts: the field has better ones."""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# what is found -> what to write instead. Names count as well: `_` separates words.
COINED = {
    r"folded|unfold(?:s|ed|ing)?": "compressed, decompress",
    r"lookers?|(?:an?|one|two|each|every|last|next|first|those|these) looks?(?![-_]| (?:at|for|up|like|into)\b)": (
        "poll, probe"
    ),
    r"couriers?": "ledger client",
    r"trails?": "request record",
    r"survey(?:s|ed|ing)?": "repository scan",
    r"outlooks?": "wait estimate",
    r"stillborn": "failed start",
    r"mend(?:s|ed|ing)?": "fix",
    r"greeted with|TLS greetings?": "TLS handshake",
    r"(?:told|said): (?!(?:str|bytes|object)\b)(?-i:[a-z])\w*(?!\[)": "a sentence: reported, denied",
}
# In documentation only.
PUBLIC = {r"rooms": "stages, folders"}
# Words that are plain English in a sentence, but as a name, or part of one, do not say what they name.
NAMES = {
    "asked": "model call; or whatever was requested",
    r"look(?:s|ed)?(?!_(?:up|at|like|for|after|again))": "poll, list; digest",
    "told": "reported; or what is sent",
    "said": "denied, reported; or what the answer is",
    "places": "model locations; slots, positions",
    "experience": "service-time statistics",
    "greeting": "TLS handshake",
}
# The folders whose names count. Tests and benchmarks are read as sentences.
NAMED = ("cli/", "examples/", "gateway/", "inference/", "logic/", "policies/", "terraform/", "wire/")
# Words that are plain English elsewhere, and no names for a file.
FILES = ("asked", "experience", "look", "looks", "places", "said", "told", "words")
# What they may mean in plain English, or in somebody else's protocol.
ALLOWED = re.compile(
    r"recommend|amend|commend|case-?fold\w*|trail(?:ing|er)\w*|nothing is owed"
    r"|folded (?:heads?|header|lines?)|line that is folded| folded\\r|!= said:",
    re.IGNORECASE,
)
# Folders whose words are still to be replaced. The list only ever gets shorter.
NOT_YET: tuple[str, ...] = ()
SUFFIXES = (".py", ".md", ".tf", ".toml", ".yaml", ".yml")
SKIPPED = ("benchmarks/results/", "docs/decisions/", "CHANGELOG.md", "tests/house/test_words.py", "LICENSE")


def files() -> Iterator[tuple[str, Path]]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if name.endswith(SUFFIXES) and not name.startswith((*SKIPPED, *NOT_YET)) and (ROOT / name).is_file():
            yield name, ROOT / name


ANY = re.compile(rf"(?<![A-Za-z])(?:{'|'.join(COINED | PUBLIC)})(?![a-z])", re.IGNORECASE)


def hits(name: str, text: str) -> Iterator[str]:
    """`line: word -> replacement` of each coined word of a text."""
    if not ANY.search(ALLOWED.sub("", text)):
        return
    coined = COINED | PUBLIC if name.endswith(".md") else COINED
    for number, line in enumerate(text.splitlines(), start=1):
        plain = ALLOWED.sub("", line)
        for word, instead in coined.items():
            for found in re.finditer(rf"(?<![A-Za-z])(?:{word})(?![a-z])", plain, re.IGNORECASE):
                yield f"{number}: {found[0]!r}, write {instead}"


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of everything that a module defines or uses: variables, attributes, parameters, functions."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname"):
            if isinstance(found := getattr(node, field, None), str):
                yield getattr(node, "lineno", 0), found


def is_named(word: str, name: str) -> bool:
    return re.search(rf"(?<![a-z])(?:{word})(?![a-z])", name.lower()) is not None


@cache
def misnamed(name: str) -> list[str]:
    """Return the words of `NAMES` that a name has."""
    return [word for word in NAMES if is_named(word, name)]


def test_no_coined_word_is_left() -> None:
    found = [f"{name}:{hit}" for name, path in files() for hit in hits(name, path.read_text())]
    assert found == []


def test_no_name_says_only_that_something_was_said_or_asked() -> None:
    found = [
        f"{name}:{line}: {each!r}, write {NAMES[word]}"
        for name, path in files()
        if name.endswith(".py") and name.startswith(NAMED)
        for text in [path.read_text()]
        if misnamed(text)  # most modules have none of the words at all, and need not be parsed
        for line, each in names(ast.parse(text))
        for word in misnamed(each)
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "bodies are folded",
        "the looker",
        "two looks later",
        "a courier",
        "the trail of a call",
        "it surveys a folder",
        "the outlook",
        "stillborn",
        "mends it",
        "TLS greeting",
        "told: what it is",
        "told: what it is, said: what it is not",
    ],
)
def test_a_coined_word_is_found(text: str) -> None:
    assert list(hits("a.py", text))


@pytest.mark.parametrize(
    "text",
    [
        "a folded header",
        "it recommends",
        "trailing bytes",
        "look it up",
        "it was told to stop",
        "told: str = x",
        "said: dict[str, str]",
    ],
)
def test_plain_english_is_no_hit(text: str) -> None:
    assert not list(hits("a.py", text))


def test_names_are_found_wherever_they_stand() -> None:
    code = (
        "import a as said\ndef told(asked): self._places = look(first_experience, owed=1)\nclass Greeting: look_up = 1"
    )
    found = [name for _, name in names(ast.parse(code))]
    assert [word for word in NAMES if not any(is_named(word, name) for name in found)] == []
    assert not any(is_named(word, "look_up") for word in NAMES)


def test_no_file_is_named_by_a_coined_word() -> None:
    assert [name for name, path in files() if path.stem in FILES or list(hits("", path.stem))] == []


def test_the_verbs_of_a_call_have_the_owners_that_their_decision_lists() -> None:
    owners: dict[str, set[str]] = {}
    for path in ROOT.glob("*/oriel_*/**/*.py"):
        unit, _, room, *_ = path.relative_to(ROOT).with_suffix("").parts
        for verb in re.findall(r"(?m)^ +(?:async )?def (\w+)\(", path.read_text()):
            owners.setdefault(verb, set()).add(f"{unit}/{room}")
    page = (ROOT / "docs/decisions/0225-verbs-of-a-call.md").read_text()
    listed = dict(re.findall(r"(?m)^\| `(\w+)` \| .+ \| (.+) \|$", page))
    assert listed and {verb: ", ".join(sorted(owners[verb])) for verb in listed} == listed
