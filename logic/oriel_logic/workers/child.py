"""A worker process: sets the services up, then runs one job after another until its socket ends."""

import gc
import os
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn, TypedDict

from oriel_logic.loading.handlers import setup_problem
from oriel_logic.services.definition import Definition
from oriel_logic.services.serving import Services
from oriel_logic.workers.frames import Kind
from oriel_logic.workers.link import Link
from oriel_logic.workers.memory import MemoryBound
from oriel_logic.workers.work import JobRunner


class Report(TypedDict):
    """The first message of a worker.

    pid: this process, once it is a worker.
    problems: {service: why it cannot run here}.
    definitions: the services by name, without code.
    """

    pid: int
    problems: dict[str, str]
    definitions: dict[str, Definition]


def run(
    sock: socket.socket,
    services: Services,
    definitions: Sequence[Definition],
    report: Report,
    *,
    limit_bytes: int,
) -> NoReturn:
    """Run the worker. Never returns: the process ends with its socket."""
    code = 1
    try:
        report["pid"] = os.getpid()
        problems = {each.name: setup_problem(services, each) for each in definitions}
        report["problems"] |= {name: problem for name, problem in problems.items() if problem}
        gc.collect()
        gc.freeze()  # the services' objects live until the end: no collection need walk them
        memory = MemoryBound()
        link = Link(sock, memory, limit_bytes=limit_bytes)
        link.send(Kind.READY, report)
        runner = JobRunner(link, services, memory)
        more = True
        while more:
            frame = link.receive()
            if frame.kind is Kind.JOB:  # others came too late for the previous job
                more = runner.work(frame)
        code = 0
    except OSError:
        code = 0  # the logic process has ended
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def has_stage_here(definition: Definition) -> bool:
    return any(definition.runs_in_worker(stage) for stage in definition.stages())
