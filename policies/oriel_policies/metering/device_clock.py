"""Charges batches for the time of a device that several of them may share, without counting any instant twice.

The clock advances by dt / n while n batches run, and a batch is charged how far it advanced during the batch. Then the
charges of all batches are together the time during which the device was busy: to the nanosecond, for any order of
starts and ends. This is the virtual time of fair queueing (Parekh, Gallager 1993) with equal weights.
"""


class DeviceClock:
    """The clock of one device. Times are integer nanoseconds. Single writer.

    busy_ns: nanoseconds during which at least one batch ran, up to the last call.
    charged_ns: the sum of all charges.
    running: number of batches that run.
    """

    __slots__ = ("_at_ns", "_rest_ns", "_virtual_ns", "busy_ns", "charged_ns", "running")

    def __init__(self) -> None:
        self.busy_ns = self.charged_ns = 0
        self.running = 0
        self._at_ns = 0
        self._virtual_ns = 0
        # Nanoseconds that could not be divided evenly among the running batches. They are divided later.
        self._rest_ns = 0

    def start(self, now_ns: int) -> int:
        """Begin a batch; the result goes to `end`."""
        self.advance(now_ns)
        self.running += 1
        return self._virtual_ns

    def end(self, started: int, now_ns: int) -> int:
        """End a batch and return its charge. started: the value that `start` returned for it."""
        self.advance(now_ns)
        charge = self._virtual_ns - started
        self.running -= 1
        if not self.running:
            charge += self._rest_ns
            self._rest_ns = 0
        self.charged_ns += charge
        return charge

    def advance(self, now_ns: int) -> None:
        """Count the time up to `now_ns`. A time before the last one counts as the last one."""
        spent_ns = now_ns - self._at_ns
        if spent_ns <= 0:
            return
        self._at_ns = now_ns
        running = self.running
        if running:
            self.busy_ns += spent_ns
            if running == 1:
                self._virtual_ns += spent_ns + self._rest_ns
                self._rest_ns = 0
            else:
                step_ns, self._rest_ns = divmod(spent_ns + self._rest_ns, running)
                self._virtual_ns += step_ns
