"""What a job's frame says about how it is to run."""

from typing import NamedTuple

__all__ = ["WINDOW", "Terms"]

WINDOW = 8  # pieces of a stream that may be on their way before its reader has taken one


class Terms(NamedTuple):
    """streams: it yields pieces. is_batch: the arguments are the rows of several callers.

    memory_mb: how much more it may take than its worker had when it was ready; 0: no bound.

    The others are what `ctx` shows there; deadline: monotonic seconds, which all processes of a machine share.
    """

    streams: bool = False
    memory_mb: int = 0
    request_id: str = ""
    deadline: float = 0.0
    tier: str = ""
    tenant: str = ""
    is_batch: bool = False
