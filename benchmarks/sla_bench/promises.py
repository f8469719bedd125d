"""Judges how far a run kept the promises R1 to R5 and R8. Pure.

A promise is judged only by phases in which the server could do what it could when C was measured. Its capacity is
measured again after each phase; where it had moved by more than DRIFT, nothing is said.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sla_bench.stack import MODEL

__all__ = ["DRIFT", "GIVE_UP", "drift", "judge"]

CORES = 2
DRIFT = 0.1
GIVE_UP = 4  # times the target: the gateway's own deadline for a call that names none
Cell = Mapping[str, Any]


def drift(capacity: float, cell: Cell) -> float:
    """Return the share of `capacity` by which the server's rate differed before or after a phase: the larger one."""
    return max(abs(each / capacity - 1.0) for each in (cell["capacity_before"], cell["capacity_after"]))


class _Judge:
    def __init__(self, found: Mapping[str, Any]) -> None:
        self.found = found
        self.by_load: Mapping[str, Cell] = {cell["load"]: cell for cell in found["loads"]}
        self.verdicts: list[dict[str, Any]] = []

    def say(self, promise: str, loads: Sequence[str], shown: str, wanted: str, kept: bool | None) -> None:
        """kept: None where it could not be measured, and where the machine moved during one of `loads`."""
        moved = max(drift(self.found["capacity"], self.by_load[load]) for load in loads)
        if moved > DRIFT:
            shown, kept = f"{shown}; capacity moved by {moved * 100:.0f} %", None
        self.verdicts.append({"promise": promise, "found": shown, "wanted": wanted, "kept": kept})

    def share(self, promise: str, loads: Sequence[str], value: float | None, least: float) -> None:
        """A share that has to be at least `least`; None: too few calls to say."""
        shown = "-" if value is None else f"{value * 100:.2f} %"
        self.say(promise, loads, shown, f">= {least * 100:g} %", None if value is None else value >= least)

    def gold(self) -> None:
        """R1."""
        loads = ("1x", "2x", "5x", "10x")
        for load, least in zip(loads, (0.995, 0.995, 0.99, 0.97), strict=True):
            attainment = self.by_load[load]["tiers"]["gold"]["attainment"]
            self.share(f"R1 gold in target at {load}", [load], attainment, least)
        refused = sum(sum(self.by_load[load]["tiers"]["gold"]["refused"].values()) for load in loads)
        self.say("R1 gold refusals", loads, str(refused), "0", refused == 0)
        one, ten = (self.by_load[load]["tiers"]["gold"]["latency_ms"] or {} for load in ("1x", "10x"))
        if one.get("p99") and ten.get("p99"):
            bound = 2.0 * one["p99"] + MODEL.max_batch * self.found["service_ms"]
            wanted = f"<= 2 x at 1x + a batch: {bound:.0f} ms"
            self.say("R1 gold p99 at 10x", ["1x", "10x"], f"{ten['p99']:.0f} ms", wanted, ten["p99"] <= bound)

    def goodput(self) -> None:
        """R2."""
        ten = self.by_load["10x"]
        free = max(0.0, CORES - ten["generator_cores"] - ten["gateway_cores"])
        left = self.found["capacity"] * min(1.0, free / max(self.found["server_cores"], 1e-9))
        goodput = ten["goodput_per_s"]
        shown, kept = "-", None
        if goodput is not None:
            shown, kept = f"{goodput:.1f} of {left:.1f} per s = {goodput / left * 100:.0f} %", goodput >= 0.85 * left
        self.say("R2 goodput at 10x of what generator and gateway leave of C", ["10x"], shown, ">= 85 %", kept)
        after = "0.5x after the flood"
        known = [each["attainment"] for each in self.by_load[after]["tiers"].values()]
        slowest = None if None in known else min(known)
        self.share("R2 in target, all tiers, from 2 s after the flood", [after], slowest, 0.99)

    def refusals(self) -> None:
        """R3 and R5, of every tier and reason of which there were enough."""
        taken = [
            found["p99"]
            for each in self.by_load["5x"]["tiers"].values()
            for reason, found in (each["refused_ms"] or {}).items()
            if reason[:3] in ("429", "503") and found["p99"] is not None
        ]
        late = [
            found["p99"] - GIVE_UP * self.found["tiers"][name]["target_ms"]
            for load in ("1x", "2x")
            for name, each in self.by_load[load]["tiers"].items()
            for reason, found in (each["refused_ms"] or {}).items()
            if reason == "504 deadline_exceeded" and found["p99"] is not None
        ]
        worst, latest = max(taken, default=None), max(late, default=None)
        shown = "-" if worst is None else f"{worst:.1f} ms"
        self.say("R3 p99 of refusals at 5x", ["5x"], shown, "<= 50 ms", None if worst is None else worst <= 50.0)
        shown = "-" if latest is None else f"deadline + {latest:.1f} ms"
        kept = None if latest is None else latest <= 20.0
        self.say("R5 p99 of 504s at up to 2x", ["1x", "2x"], shown, "<= deadline + 20 ms", kept)

    def tenants(self) -> None:
        """R4 and R8."""
        one, both = "R4 quiet 0.4x, noisy 3x", "R4 quiet 1.5x, noisy 3x"
        calm, full = self.by_load[one], self.by_load[both]
        self.share("R4 quiet tenant in target", [one], calm["tiers"]["quiet"]["attainment"], 0.99)
        noisy = _share_of(full, "noisy")
        wanted = "<= 60 % (half x 1.2)"
        self.say("R4 noisy tenant's share while both want more", [both], f"{noisy * 100:.2f} %", wanted, noisy <= 0.6)
        rest = max(1e-9, calm["answered_per_s"] - 0.4 * self.found["capacity"])
        idle = _share_of(calm, "noisy") * calm["answered_per_s"] / rest
        self.share("R4 noisy tenant's part of what the quiet one leaves", [one], idle, 0.95)
        conserved = calm["answered_per_s"] / max(1e-9, full["answered_per_s"])
        promise = "R4 answers of the pool meanwhile, of those when both want more"
        self.share(promise, [one, both], conserved, 0.95)
        floor = "R8 gold 5x, bronze 0.2x"
        share = _share_of(self.by_load[floor], "bronze")
        shown = f"{share * 100:.2f} %"
        self.say("R8 bronze's share of what is executed", [floor], shown, ">= 5 %", share >= 0.0495)


def _share_of(cell: Cell, tier: str) -> float:
    """The share of one tenant in the good answers of a phase."""
    share: float = cell["tiers"][tier]["good"] / max(1, sum(each["good"] for each in cell["tiers"].values()))
    return share


def judge(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Verdicts: promise, found, wanted, and kept (None: not judged)."""
    judge = _Judge(found)
    judge.gold()
    judge.goodput()
    judge.refusals()
    judge.tenants()
    return judge.verdicts
