"""When a canary is rolled back: it fails, is late or answers otherwise more often than the other side of its split, and
chance does not explain that. Pure.

Both sides are counted in the same time, in slots that last until each side has had `min_calls` calls, so that what is
compared is what happened lately. The share of bad calls of one side has an interval of confidence (Wilson 1927);
the difference of two shares has one made of theirs (Newcombe 1998, method 10). A canary is rolled back when the whole
interval is beyond the margin. With Z the interval is left by chance on one side once in 2,000 times; the margin and the
slots keep that rare also for a canary that is judged with every call. A verdict is final.
"""

from collections import deque
from dataclasses import dataclass
from math import sqrt
from typing import Final

Z: Final = 3.29
SLOTS: Final = 5
MIN_COMPARED: Final = 50  # answers whose classes were compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """The rule of one canary.

    canary: the side of the split that is judged. min_calls: on each side before anything is judged.
    margin: the share by which more of its calls may fail or be late. agreement: the least share of compared rows with
    the same class; 0 if answers may differ. compare_share: the share of its calls that are made on the other side as
    well.
    """

    canary: str
    min_calls: int = 100
    margin: float = 0.02
    agreement: float = 0.9
    compare_share: float = 0.1


@dataclass(slots=True)
class Counts:
    """Calls of one side. failed: without a good answer; late: answered after the target."""

    calls: int = 0
    failed: int = 0
    late: int = 0

    def add(self, other: "Counts") -> None:
        self.calls += other.calls
        self.failed += other.failed
        self.late += other.late


@dataclass(slots=True)
class _Slot:
    canary: Counts
    other: Counts
    compared: int = 0
    agreed: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Why a canary is rolled back. reason: "errors", "attainment" or "agreement"."""

    reason: str
    text: str


def wilson(count: float, total: int) -> tuple[float, float]:
    """Return the interval of confidence of a share. 0 <= count <= total."""
    if not total:
        return 0.0, 1.0
    share, square = count / total, Z * Z
    centre = share + square / (2 * total)
    half = Z * sqrt(share * (1.0 - share) / total + square / (4 * total * total))
    scale = 1.0 + square / total
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def least_difference(bad: int, total: int, other_bad: int, other_total: int) -> float:
    """Return by how much the first share is larger than the second one at least, with confidence."""
    if not total or not other_total:
        return -1.0
    share, other = bad / total, other_bad / other_total
    low = wilson(bad, total)[0]
    high = wilson(other_bad, other_total)[1]
    return share - other - sqrt((share - low) ** 2 + (high - other) ** 2)


class CanaryWatch:
    """Counts the calls of a split with a canary, and judges it. verdict: the reason to roll back; None until then."""

    __slots__ = ("_slots", "rule", "verdict")

    def __init__(self, rule: Rollback) -> None:
        self.rule = rule
        self.verdict: Verdict | None = None
        self._slots: deque[_Slot] = deque([_Slot(Counts(), Counts())], maxlen=SLOTS)

    def finished(self, *, canary: bool, result: str) -> Verdict | None:
        """Count a call that is over; return the verdict if this call leads to one.

        result: "met", "late" or "missed".
        """
        if self.verdict is not None:
            return None
        slot = self._slots[-1]
        if min(slot.canary.calls, slot.other.calls) >= self.rule.min_calls:
            slot = _Slot(Counts(), Counts())
            self._slots.append(slot)
        counts = slot.canary if canary else slot.other
        counts.calls += 1
        counts.failed += result == "missed"
        counts.late += result == "late"
        return self._judge() if canary and result != "met" else None

    def compared(self, rows: float) -> Verdict | None:
        """Count an answer of the canary that was compared; return the verdict if it leads to one.

        rows: the share of its rows that have the same class on the other side.
        """
        if self.verdict is not None:
            return None
        slot = self._slots[-1]
        slot.compared += 1
        slot.agreed += rows
        return self._judge() if rows < 1.0 else None

    @property
    def counts(self) -> tuple[Counts, Counts]:
        """The latest calls of the canary and of the other side."""
        canary, other = Counts(), Counts()
        for slot in self._slots:
            canary.add(slot.canary)
            other.add(slot.other)
        return canary, other

    def _judge(self) -> Verdict | None:
        rule = self.rule
        canary, other = self.counts
        if min(canary.calls, other.calls) >= rule.min_calls:
            for reason, what, bad, other_bad in (
                ("errors", "failed", canary.failed, other.failed),
                ("attainment", "failed or were late", canary.failed + canary.late, other.failed + other.late),
            ):
                if least_difference(bad, canary.calls, other_bad, other.calls) > rule.margin:
                    text = f"{bad} of its last {canary.calls} calls {what}, {other_bad} of {other.calls} elsewhere"
                    self.verdict = Verdict(reason=reason, text=text)
                    return self.verdict
        compared = sum(slot.compared for slot in self._slots)
        agreed = sum(slot.agreed for slot in self._slots)
        if rule.agreement and compared >= MIN_COMPARED and wilson(min(agreed, compared), compared)[1] < rule.agreement:
            text = f"{agreed / compared:.1%} of the rows of {compared} answers have the same class elsewhere"
            self.verdict = Verdict(reason="agreement", text=text)
        return self.verdict
