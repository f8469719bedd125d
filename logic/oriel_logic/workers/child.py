"""A worker: sets the services up, then runs one job after the other until its socket ends."""

import os
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn, TypedDict

from oriel_logic.definition import Definition
from oriel_logic.errors import Refused
from oriel_logic.loading import one_line
from oriel_logic.workers.frames import HEADER, Frame, FrameTooLarge, Kind, decode, encode
from oriel_logic.workers.references import Services

__all__ = ["Report", "run"]

MAX_TRACEBACK = 8000


class Report(TypedDict):
    """What a worker says first. problems: {service: why it cannot run here}. descriptions: as `Definition.describe` gives them."""

    problems: dict[str, str]
    descriptions: dict[str, dict[str, Any]]


def run(
    link: socket.socket,
    services: Services,
    definitions: Sequence[Definition],
    report: Report,
    *,
    limit_bytes: int,
) -> NoReturn:
    """Never returns: the process ends with its socket."""
    code = 1
    try:
        report["problems"] |= set_up(services, definitions)
        link.sendall(encode(Kind.READY, report, limit_bytes=limit_bytes))
        while (frame := receive(link)) is not None:
            link.sendall(execute(services, frame, limit_bytes))
        code = 0
    except OSError:
        code = 0  # the logic process is gone
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def set_up(services: Services, definitions: Sequence[Definition]) -> dict[str, str]:
    """Instances and `setup` of every service that has a stage here; {service: why it failed}."""
    problems: dict[str, str] = {}
    for definition in definitions:
        if not any(definition.runs_in_worker(stage) for stage in definition.stages()):
            continue
        try:
            services.set_up(definition)
        except (Exception, SystemExit) as error:  # user code: it concerns this service only
            problems[definition.name] = f"its setup failed: {one_line(error)}"
    return problems


def receive(link: socket.socket) -> Frame | None:
    header = receive_exactly(link, HEADER.size)
    if header is None:
        return None
    length, kind, cpu_us = HEADER.unpack(header)
    payload = receive_exactly(link, length)
    return None if payload is None else Frame(Kind(kind), cpu_us, payload)


def receive_exactly(link: socket.socket, size: int) -> bytes | None:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = link.recv_into(view)
        if not count:
            return None
        view = view[count:]
    return bytes(data)


def execute(services: Services, frame: Frame, limit_bytes: int) -> bytes:
    """Run one job; the frame that answers it."""
    started = time.process_time_ns()

    def answer(kind: Kind, value: Any) -> bytes:
        cpu_us = (time.process_time_ns() - started) // 1000
        return encode(kind, value, limit_bytes=limit_bytes, cpu_us=cpu_us)

    try:
        reference, arguments = decode(frame)
        return answer(Kind.RESULT, services.resolve(reference)(*arguments))
    except Refused as refused:
        return answer(Kind.REFUSED, (refused.outcome.value, refused.message))
    except FrameTooLarge as error:
        return answer(Kind.FAILED, (f"its result is too large: {error}", ""))
    except (Exception, SystemExit) as error:  # user code: whatever it raises is this job's answer
        # The first frame is this one; what follows is the user's.
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        return answer(Kind.FAILED, (one_line(error), "".join(lines)[-MAX_TRACEBACK:]))
