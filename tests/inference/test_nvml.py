"""The load of GPUs, against a stand-in for NVIDIA's management library: what is told, left out and survived."""

import logging
import threading
from typing import Any

import pytest

from oriel_inference.backends.nvml import GpuLoad, GpuLoads

from ..waiting import until
from .management_library import BUS_IDS, UUIDS, ManagementLibrary


def test_each_gpu_of_this_process_with_what_its_driver_gives() -> None:
    library = ManagementLibrary()
    loads = GpuLoads(BUS_IDS, lambda: library)
    first, second = loads.read()
    assert first == GpuLoad(
        uuid=UUIDS[0],
        utilization=0.37,
        memory_total=80 << 30,
        memory_used=1 << 30,
        power=70.5,
        power_limit=700.0,
        energy=0.0,
    )
    assert (second.uuid, second.utilization, second.memory_used) == (UUIDS[1], 1.0, 2 << 30)
    assert (second.power, second.power_limit, second.energy) == (None, None, None)
    library.energy_mj += 1_500
    assert loads.read()[0].energy == 1.5, "joules since the first reading, not since the driver was loaded"
    (only,) = GpuLoads(BUS_IDS[1:], lambda: library).read()
    assert only.uuid == UUIDS[1], "GPUs that CUDA does not show are not told"


def missing() -> Any:
    raise ImportError("No module named 'pynvml'")


@pytest.mark.parametrize(
    ("bus_ids", "open_library", "logged"),
    [
        ([], missing, ""),
        (BUS_IDS, missing, "pip install nvidia-ml-py"),
        (BUS_IDS, lambda: ManagementLibrary(broken=True), "Driver Not Loaded"),
        (["0000:99:00.0"], ManagementLibrary, "Not Found"),
    ],
)
def test_a_machine_that_does_not_say_has_no_figures_and_one_line(
    bus_ids: list[str], open_library: Any, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    loads = GpuLoads(bus_ids, open_library)
    assert loads.read() == [] and loads.read() == []
    assert len(caplog.messages) == bool(logged) and logged in caplog.text


async def test_a_driver_that_does_not_answer_holds_neither_the_scrape_nor_threads() -> None:
    go, asked = threading.Event(), []

    def slow() -> ManagementLibrary:
        asked.append(threading.get_ident())
        go.wait(60)
        return ManagementLibrary()

    loads = GpuLoads(BUS_IDS, slow, wait_s=0.01)
    assert await loads.latest() == [] and await loads.latest() == []
    go.set()

    async def told() -> bool:
        return [gpu.uuid for gpu in await loads.latest()] == list(UUIDS)

    await until(told)
    assert len(asked) == 1 and asked[0] != threading.get_ident()
