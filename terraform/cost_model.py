"""Computes the cost of a mix of pods on nodes with one GPU, with and without placement; prints the tables of README.md.

    python terraform/cost_model.py

Pods are packed first-fit, the largest first, which is about what the scheduler and an autoscaler end at after a while;
requests count, not use. Placement: CPU pods fill what GPU nodes have left before they ask for CPU nodes.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Size:
    """A size of a machine or a pod, in CPUs and GiB of memory."""

    cpus: float
    gib: float

    def holds(self, other: "Size") -> bool:
        return self.cpus >= other.cpus and self.gib >= other.gib

    def without(self, other: "Size") -> "Size":
        return Size(self.cpus - other.cpus, self.gib - other.gib)


# 8 CPUs and 32 GiB, of which daemons, kubelet and system have 2 CPUs and 4 GiB; half of that on nodes half the size.
GPU_NODE = Size(8, 32).without(Size(2, 4))
CPU_NODE = Size(4, 16).without(Size(1, 2))

# What the pods of modules/platform request by default.
GPU_POD = Size(2, 12)
LOGIC_POD = Size(1, 2)
CPU_INFERENCE_POD = Size(2, 4)


@dataclass(frozen=True, slots=True)
class Hours:
    """A part of the day: how long, and the pods meanwhile."""

    name: str
    hours: int
    gpu: int
    logic: int
    cpu_inference: int


MIX = (
    Hours("peak", 8, 8, 24, 8),
    Hours("day", 10, 4, 12, 4),
    Hours("night", 6, 1, 3, 1),
)
# The same, with three times the CPU work for each GPU: more than GPU nodes have to spare.
HEAVY = tuple(Hours(each.name, each.hours, each.gpu, 3 * each.logic, 3 * each.cpu_inference) for each in MIX)


@dataclass(frozen=True, slots=True)
class Cloud:
    """Node types of the roots, and US$ per hour."""

    name: str
    region: str
    gpu_type: str
    gpu_price: float
    cpu_type: str
    cpu_price: float


PRICES_OF = "2026-11-22"
CLOUDS = (
    Cloud("aws", "us-east-1", "g6.2xlarge", 0.9776, "m6i.xlarge", 0.1920),
    Cloud("gcp", "us-central1", "g2-standard-8", 0.8536, "n2-standard-4", 0.1942),
    Cloud("azure", "eastus", "Standard_NC8as_T4_v3", 0.7520, "Standard_D4s_v5", 0.1920),
)
DAYS = 30


def nodes(hours: Hours, *, placement: bool) -> tuple[int, int]:
    """Count the nodes with a GPU (one for each GPU pod), and those without."""
    shared = [GPU_NODE.without(GPU_POD)] * hours.gpu if placement else []
    own: list[Size] = []
    for pod in [CPU_INFERENCE_POD] * hours.cpu_inference + [LOGIC_POD] * hours.logic:
        for pool in (shared, own):
            number = next((at for at, node in enumerate(pool) if node.holds(pod)), None)
            if number is not None:
                pool[number] = pool[number].without(pod)
                break
        else:
            own.append(CPU_NODE.without(pod))
    return hours.gpu, len(own)


def month(cloud: Cloud, mix: tuple[Hours, ...], *, placement: bool) -> float:
    """US$ for 30 days."""
    total = 0.0
    for each in mix:
        gpu, cpu = nodes(each, placement=placement)
        total += DAYS * each.hours * (gpu * cloud.gpu_price + cpu * cloud.cpu_price)
    return total


def table() -> Iterator[str]:
    yield "| mix | part of the day | pods: GPU | logic | CPU inference | nodes: GPU | CPU | CPU, with placement |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, mix in (("usual", MIX), ("much CPU work", HEAVY)):
        for each in mix:
            gpu, without = nodes(each, placement=False)
            _, shared = nodes(each, placement=True)
            pods = f"{each.gpu} | {each.logic} | {each.cpu_inference}"
            yield f"| {name} | {each.name}, {each.hours} h | {pods} | {gpu} | {without} | {shared} |"
    yield ""
    yield "| cloud | nodes, US$ per hour | mix | month without | month with placement | saved |"
    yield "|---|---|---|---|---|---|"
    for cloud in CLOUDS:
        prices = f"{cloud.gpu_type} {cloud.gpu_price:.4f}, {cloud.cpu_type} {cloud.cpu_price:.4f} ({cloud.region})"
        for name, mix in (("usual", MIX), ("much CPU work", HEAVY)):
            before, after = (month(cloud, mix, placement=placement) for placement in (False, True))
            yield f"| {cloud.name} | {prices} | {name} | {before:,.0f} | {after:,.0f} | {1 - after / before:.0%} |"


if __name__ == "__main__":
    sys.stdout.write("\n".join(table()) + "\n")
