"""Costs 10 ms of processor time in a worker process."""

import time

from oriel_logic import Request, service

COST_S = 0.01


@service
def work(request: Request) -> bytes:
    end = time.process_time() + COST_S
    while time.process_time() < end:
        pass
    return request.body
