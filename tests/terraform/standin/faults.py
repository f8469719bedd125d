"""Errors that a test orders for the next apply: the cloud refuses, or fails when half of the work is done."""

import threading


class Faults:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: dict[tuple[str, str], tuple[int, bool]] = {}
        self._seen: dict[tuple[str, str], int] = {}

    def add(self, type_name: str, nth: int = 1, *, action: str = "create", half_done: bool = False) -> None:
        """Let the nth such call of the next command fail. half_done: the resource exists all the same, tainted."""
        self._wanted[type_name, action] = (nth, half_done)

    def clear(self) -> None:
        self._wanted.clear()
        self._seen.clear()

    def strikes(self, type_name: str, action: str) -> str | None:
        """Return None, "refused" or "half done" for the call that is being made."""
        with self._lock:
            key = (type_name, action)
            self._seen[key] = self._seen.get(key, 0) + 1
            nth, half_done = self._wanted.get(key, (0, False))
            if self._seen[key] != nth:
                return None
        return "half done" if half_done else "refused"
