"""Workers that run a job when a test says so."""

from oriel_inference.batching.workers import Job


class ManualWorkers:
    """Keeps jobs in `jobs` until `run_next` or `run_all`."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def submit(self, job: Job) -> None:
        self.jobs.append(job)

    def let_begin(self) -> None:
        pass

    def run_next(self) -> None:
        self.jobs.pop(0)()

    def run_all(self) -> None:
        while self.jobs:
            self.run_next()
