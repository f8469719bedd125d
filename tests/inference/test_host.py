"""Utilisation and memory of the machine, read from files like those of `/proc`."""

from pathlib import Path

import pytest

from oriel_inference.host import HostLoad


def machine(proc: Path, busy: int, idle: int) -> None:
    (proc / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 2 3\n")
    (proc / "meminfo").write_text("MemTotal:  100 kB\nMemFree:  10 kB\nMemAvailable:  40 kB\nHugePages_Total:  0\n")


def test_utilisation_is_that_of_the_last_window(tmp_path: Path) -> None:
    now = [0.0]
    machine(tmp_path, 100, 100)
    host = HostLoad(tmp_path, lambda: now[0])
    assert host.utilization() == 0.0
    machine(tmp_path, 130, 110)
    now[0] = 0.5
    assert host.utilization() == 0.0, "too short a window"
    now[0] = 2.0
    assert host.utilization() == 0.75
    machine(tmp_path, 130, 210)
    assert host.utilization() == 0.75, "read again at once"
    now[0] = 4.0
    assert host.utilization() == 0.0
    assert host.memory_bytes() == (102_400, 61_440)


@pytest.mark.parametrize("text", [None, "", "cpu 1 2", "cpu a b c d e f g h"])
def test_a_machine_that_does_not_say_has_no_figures(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "stat").write_text(text)
        (tmp_path / "meminfo").write_text(text)
    host = HostLoad(tmp_path, lambda: 0.0)
    assert host.utilization() is None and host.memory_bytes() is None
