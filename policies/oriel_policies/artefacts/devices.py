"""Names of devices, as cloud providers and vendors write them, and what artefacts for them need.

Machine code for a GPU depends on its compute capability, so devices with the same one share artefacts.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

CPU = "cpu"
# NVIDIA's own list of GPUs by compute capability (developer.nvidia.com/cuda-gpus).
CAPABILITIES: Mapping[str, str] = {
    "p100": "6.0",
    "p4": "6.1",
    "v100": "7.0",
    "t4": "7.5",
    "a30": "8.0",
    "a100": "8.0",
    "a2": "8.6",
    "a10": "8.6",
    "a10g": "8.6",
    "a16": "8.6",
    "a40": "8.6",
    "l4": "8.9",
    "l40": "8.9",
    "l40s": "8.9",
    "h100": "9.0",
    "h200": "9.0",
    "gh200": "9.0",
    "b200": "10.0",
    "gb200": "10.0",
    "b300": "10.3",
    "gb300": "10.3",
}
MAX_TARGETS = 32
_CAPABILITY = re.compile(r"[0-9]{1,2}\.[0-9]")


@dataclass(frozen=True, slots=True)
class Target:
    """A device to build for. capability: the compute capability of a GPU; "" for the CPU of the machine that builds."""

    name: str
    capability: str


def parse_targets(text: str) -> list[Target]:
    """Read `nvidia-l4,a100,cpu`: names, or compute capabilities as 8.9. Raises ValueError that names the wrong one."""
    found: dict[str, Target] = {}
    for part in text.split(","):
        name = part.strip().lower()
        short = name.removeprefix("nvidia-").removeprefix("tesla-")
        if name == CPU:
            found[name] = Target(CPU, "")
        elif short in CAPABILITIES:
            found[short] = Target(name, CAPABILITIES[short])
        elif _CAPABILITY.fullmatch(name):
            found[name] = Target(name, name)
        else:
            raise ValueError(
                f"{part.strip()[:64]!r} is not a known device: use cpu, a compute capability such as 8.9, or one of "
                f"{', '.join(CAPABILITIES)}"
            )
    if len(found) > MAX_TARGETS:
        raise ValueError(f"names more than {MAX_TARGETS} devices")
    return list(found.values())


def lacking(target: Target, compiler: str, device: str) -> str:
    """Return a sentence about the means that this machine lacks to build for `target`; "" if it can.

    device: the device that `compiler` builds for on this machine, as fingerprints name it.
    """
    gpu = _CAPABILITY.fullmatch(device) is not None
    if not target.capability:
        return f"{compiler} builds for GPUs: it has nothing for the CPU" if gpu else ""
    wanted = f"a machine with a GPU of compute capability {target.capability}"
    named = "" if target.name == target.capability else f", as {target.name} has it"
    if not gpu:
        return f"{compiler} builds for the CPU of this machine: it takes a compiler for GPUs, on {wanted}{named}"
    if device != target.capability:
        return f"this machine builds for compute capability {device}: build on {wanted}{named}, into the same folder"
    return ""
