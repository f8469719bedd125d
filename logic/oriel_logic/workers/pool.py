"""The worker pool: CPU work in order of promise, one job per process.

Life of a job: `call` queues it (SLA order: band, tenant, deadline) -> an idle worker takes it -> its answer settles
the caller's future. A job leaves the queue unstarted when its deadline passes, when its caller is cancelled, or when
a more urgent one displaces it. A started job cannot be interrupted: a caller that leaves just drops its answer, and
a worker still busy `overrun_s` after the job's deadline is killed, because then it may never end.

Ownership: everything here belongs to the loop. A job's future is set only if it is not done. `workers` processes are
kept alive: one that dies fails its own job and is replaced at once, later and later if workers keep dying before they
finish anything. If the fork server dies a new one is launched.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from oriel_policies.queue import Pushed, SlaQueue, Ticket
from oriel_wire.context import CallContext

from oriel_logic.errors import DeadlineExceeded, HandlerFailed, Saturated, WorkerDied
from oriel_logic.workers.frames import Frame, FrameTooLarge, Kind, encode
from oriel_logic.workers.job import Job, settle
from oriel_logic.workers.launch import Exited, ForkServer, Started
from oriel_logic.workers.worker import Worker

__all__ = ["Launcher", "PoolLimits", "WorkerPool"]

_log = logging.getLogger(__name__)
RELAUNCH_MIN_S = 0.05
RELAUNCH_MAX_S = 5.0
UNKNOWN_COST_MS = 5.0
COST_MEMORY = 0.2
