"""Swaps the sessions of a batcher's instances for others, while it serves."""

from collections.abc import Callable, Collection, MutableMapping, Sequence

from oriel_inference.backends import Session
from oriel_inference.batching.device import Device
from oriel_inference.batching.running import Running


def swap_sessions(
    sessions: Sequence[Session],
    idle: list[Session],
    running: Collection[Running],
    device_of: MutableMapping[int, Device],
    host: Device,
) -> Callable[[], bool]:
    """Give the instances of a model other sessions, one each, on the same devices; between two turns of the loop.

    Executions go on, and their instance has the new session afterwards. Returns a function that tells whether something
    that ran at the swap still does: until then, the sessions of before must stay open. Not for sessions that take
    requests one by one, nor for decoupled models.
    idle, running, device_of: of the batcher, changed in place. host: the device of sessions without one.
    """
    began = list(running)
    before = [*idle, *(batch.session for batch in began)]
    devices = [device_of.get(id(session), host) for session in before]
    device_of.clear()
    device_of.update({id(session): device for session, device in zip(sessions, devices, strict=True)})
    for batch, session in zip(began, sessions[len(idle) :], strict=True):
        batch.session = session
    idle[:] = sessions[: len(idle)]
    return lambda: any(batch in running for batch in began)
