"""Counts the steps of a regular expression: a small matcher that tries what Python's tries, in the same order.

A step is one test of a character or of a position. `attacks` makes texts from the pattern itself that reach each of its
repetitions again and again, and then do not end as it wants.
"""

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice, product, zip_longest
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser
from typing import Any

MANY = 40  # a repetition that is bounded below this costs a constant
_ODD = "\x00\n"  # what most patterns do not expect at their end
# As numbers: a member of `re.RegexFlag` looks itself up in each `&`.
_MULTILINE, _DOTALL, _IGNORECASE = int(re.MULTILINE), int(re.DOTALL), int(re.IGNORECASE)
_MOST = 10  # texts that are made of one place of a pattern

Node = tuple[Any, Any]
Next = Callable[[int], bool]


class TooManySteps(Exception):
    """The matcher was stopped."""


class Takes(dict[str, bool]):
    """Whether a node for one character takes a character; each is judged once."""

    def __init__(self, kind: Any, value: Any, flags: int) -> None:
        self.node = kind, value, flags

    def __missing__(self, character: str) -> bool:
        kind, value, flags = self.node
        found = self[character] = fits(kind, value, character, flags)
        return found


@lru_cache(4)
def parsed(pattern: str | bytes, flags: int) -> tuple[list[Node], int]:
    """A pattern as Python reads it, with its flags."""
    tree = _parser.parse(pattern, flags)
    return list(tree), tree.state.flags


@lru_cache(4)
def prepared(pattern: str | bytes, flags: int) -> tuple[list[Node], int]:
    """The same for the matcher: a node for one character is `(None, Takes)`, and what has an inside has lists there."""
    tree, flags = parsed(pattern, flags)

    def inside(nodes: Any) -> list[Node]:
        return [prepare(*node) for node in nodes]

    def prepare(kind: Any, value: Any) -> Node:
        if Matcher.single(kind):
            return None, Takes(kind, value, flags)
        if kind is op.SUBPATTERN:
            return kind, (value[0], inside(value[3]))
        if kind is op.BRANCH:
            return kind, [inside(each) for each in value[1]]
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
            return kind, (value[0], value[1], inside(value[2]))
        if kind in (op.ASSERT, op.ASSERT_NOT):
            direction, inner = value
            assert direction in (1, -1)
            return kind, (0 if direction == 1 else inner.getwidth()[0], inside(inner))
        return kind, inside(value) if kind is op.ATOMIC_GROUP else value

    return inside(tree), flags


class Matcher:
    """Tries one pattern on one text. text: one character per code."""

    def __init__(self, pattern: str | bytes, flags: int, text: str, most: int) -> None:
        self.tree, self.flags = prepared(pattern, flags)
        self.text, self.steps, self.most = text, 0, most
        self.groups: dict[int, tuple[int, int]] = {}

    def step(self, count: int = 1) -> None:
        self.steps += count
        if self.steps > self.most:
            raise TooManySteps

    def match(self, at: int) -> int | None:
        """The end of a match that begins here."""
        ends: list[int] = []
        return ends[0] if self.sequence(self.tree, 0, at, lambda end: ends.append(end) or True) else None

    def search(self) -> int:
        """Look for all matches, as `findall` and `sub` do; return the steps."""
        at = 0
        while at <= len(self.text):
            end = self.match(at)
            at = at + 1 if end is None or end == at else end
        return self.steps

    def sequence(self, nodes: list[Node], index: int, at: int, then: Next) -> bool:
        size, text = len(nodes), self.text
        while index < size and nodes[index][0] is None:
            self.steps += 1
            if at >= len(text) or not nodes[index][1][text[at]]:
                return False
            index, at = index + 1, at + 1
        if self.steps > self.most:
            raise TooManySteps
        if index == size:
            return then(at)
        kind, value = nodes[index]
        index += 1

        def rest(end: int) -> bool:
            return self.sequence(nodes, index, end, then)

        if index == size:
            rest = then
        if kind is op.SUBPATTERN:
            group, inner = value

            def closed(end: int) -> bool:
                before = self.groups.get(group)
                self.groups[group] = (at, end)
                if rest(end):
                    return True
                if before is not None:
                    self.groups[group] = before
                return False

            return self.sequence(inner, 0, at, closed)
        if kind is op.BRANCH:
            return any(self.sequence(each, 0, at, rest) for each in value)
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
            return self.repeat(kind, value, at, rest)
        if kind is op.AT:
            self.step()
            return self.position(value, at) and rest(at)
        if kind in (op.ASSERT, op.ASSERT_NOT):
            width, inner = value
            found = at >= width and self.sequence(inner, 0, at - width, lambda _: True)
            return found == (kind is op.ASSERT) and rest(at)
        if kind is op.ATOMIC_GROUP:
            ends: list[int] = []
            return self.sequence(value, 0, at, lambda end: ends.append(end) or True) and rest(ends[0])
        assert kind is op.GROUPREF, kind
        start, end = self.groups.get(value, (0, 0))
        self.steps += end - start
        return text[start:end] == text[at : at + end - start] and rest(at + end - start)

    def repeat(self, kind: Any, value: Any, at: int, rest: Next) -> bool:
        least, most, nodes = value
        if len(nodes) == 1 and nodes[0][0] is None:
            takes, text = nodes[0][1], self.text
            end, limit = at, len(text) if most is op.MAXREPEAT else min(len(text), at + most)
            if kind is op.MIN_REPEAT:
                while True:
                    if end - at >= least and rest(end):
                        return True
                    self.step(end < limit)
                    if end >= limit or not takes[text[end]]:
                        return False
                    end += 1
            while end < limit and takes[text[end]]:
                end += 1
            self.step(end - at + (end < limit))
            if kind is op.POSSESSIVE_REPEAT:
                return end - at >= least and rest(end)
            for each in range(end, at + least - 1, -1):
                if rest(each):
                    return True
            return False

        def again(count: int, start: int) -> Next:
            def more(end: int) -> bool:
                if end == start and count > least:
                    return False
                if kind is op.MIN_REPEAT and count >= least and rest(end):
                    return True
                if (most is op.MAXREPEAT or count < most) and self.sequence(nodes, 0, end, again(count + 1, end)):
                    return True
                return kind is not op.MIN_REPEAT and count >= least and rest(end)

            return more

        if kind is op.POSSESSIVE_REPEAT:
            raise NotImplementedError
        return again(0, -1)(at)

    @staticmethod
    def single(kind: Any) -> bool:
        return kind in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN)

    def position(self, where: Any, at: int) -> bool:
        text, lines = self.text, self.flags & _MULTILINE
        if where in (op.AT_BEGINNING, op.AT_BEGINNING_STRING):
            return at == 0 or (where is op.AT_BEGINNING and bool(lines) and text[at - 1] == "\n")
        if where is op.AT_END_STRING:
            return at == len(text)
        if where is op.AT_END:
            return at == len(text) or (at == len(text) - 1 or bool(lines)) and text[at] == "\n"
        around = [0 <= each < len(text) and (text[each].isalnum() or text[each] == "_") for each in (at - 1, at)]
        return (around[0] != around[1]) == (where is op.AT_BOUNDARY)


def fits(kind: Any, value: Any, character: str, flags: int) -> bool:
    """Whether a node for one character takes this one."""
    if kind is op.ANY:
        return bool(flags & _DOTALL) or character != "\n"
    cases = {character, character.lower(), character.upper()} if flags & _IGNORECASE else {character}
    codes = {ord(each) for each in cases if len(each) == 1}
    if kind is op.LITERAL:
        return value in codes
    if kind is op.NOT_LITERAL:
        return value not in codes
    negated, found = value[0][0] is op.NEGATE, False
    for part, what in value:
        if part is op.LITERAL:
            found = found or what in codes
        elif part is op.RANGE:
            found = found or any(what[0] <= code <= what[1] for code in codes)
        elif part is op.CATEGORY:
            name = str(what).removeprefix("CATEGORY_")
            is_one = {"DIGIT": character.isdigit(), "SPACE": character.isspace()}.get(
                name.removeprefix("NOT_"), character.isalnum() or character == "_"
            )
            found = found or is_one != name.startswith("NOT_")
    return found != negated


class Attacks:
    """Makes texts for one pattern."""

    def __init__(self, pattern: str | bytes, flags: int) -> None:
        self.tree, self.flags = parsed(pattern, flags)
        text = pattern if isinstance(pattern, str) else pattern.decode("latin-1")
        self.letters = "".join(dict.fromkeys([*'a0 \\"', *[each for each in text if each.isprintable()], *_ODD, "-"]))

    def texts(self, short: int, long: int) -> Iterator[tuple[str, str]]:
        """Pairs of texts of about these lengths, of which the second only repeats more often."""
        seen = set()
        for before, unit in [*self.repeated(self.tree, [""]), *(("", each) for each in self.beginnings() if each)]:
            counts = [max(1, size // len(unit)) for size in (short, long)]
            for last in ("", *_ODD, unit[:1]):
                pair = (before + unit * counts[0] + last, before + unit * counts[1] + last)
                if pair not in seen:
                    seen.add(pair)
                    yield pair

    def beginnings(self) -> Iterator[str]:
        """Texts that begin a match, for a search that begins anew at each."""
        nodes = self.tree
        for count in range(1, len(nodes) + 1):
            yield from self.samples(nodes[:count], few=4)

    def repeated(self, nodes: list[Node], before: list[str]) -> Iterator[tuple[str, str]]:
        """What comes before each repetition, and what it repeats."""
        for index, (kind, value) in enumerate(nodes):
            here = [first + more for first in before for more in self.samples(nodes[:index], few=3)][:3]
            if kind in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
                if value[1] is op.MAXREPEAT or value[1] > MANY:
                    units = [each for each in self.samples(list(value[2]), few=_MOST) if each]
                    yield from product(here, units)
                yield from self.repeated(list(value[2]), here)
            elif kind is op.SUBPATTERN:
                yield from self.repeated(list(value[3]), here)
            elif kind is op.BRANCH:
                for each in value[1]:
                    yield from self.repeated(list(each), here)

    def samples(self, nodes: list[Node], few: int) -> list[str]:
        """A few texts that these nodes take."""
        found = [""]
        for kind, value in nodes:
            if Matcher.single(kind):
                choice = [chr(value)] if kind is op.LITERAL else list(self.letters)
                choice = [each for each in choice if fits(kind, value, each, self.flags)][:few]
            elif kind in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
                once = self.samples(list(value[2]), few)
                choice = [each * max(1, value[0]) for each in once] + ([""] if value[0] == 0 else [])
            elif kind in (op.SUBPATTERN, op.BRANCH, op.ATOMIC_GROUP):
                inner = value[1] if kind is op.BRANCH else [value[3] if kind is op.SUBPATTERN else value]
                by_branch = [self.samples(list(one), few) for one in inner]
                choice = [each for turn in zip_longest(*by_branch) for each in turn if each is not None]
            else:
                choice = [""]
            found = list(islice((first + each for each in dict.fromkeys(choice) for first in found), few))
        return found


def steps(pattern: str | bytes, flags: int, text: str, *, anchored: bool, most: int) -> int:
    """The steps of a match at the beginning of a text, or of a search for all matches. Stops behind `most` of them."""
    matcher = Matcher(pattern, flags, text, most)
    try:
        if anchored:
            matcher.match(0)
        else:
            matcher.search()
    except TooManySteps:
        pass
    return matcher.steps
