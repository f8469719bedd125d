"""Keeps the answers of models whose configuration enables `response_cache`, and answers equal requests from them.

Two requests are equal if they go to the same load of the same version, and their inputs have equal names, datatypes,
shapes and values. Python models also see the parameters and the requested outputs of a request, so these must be equal
as well, except `priority` and `timeout`. The key is a SHA-256 digest of all that: an answer must never go to another
tenant's different request because their keys collide.

An answer from the cache takes no place in the queue and no core. It is not kept if it has an error, is on a GPU, or
has more than MAX_ANSWER_BYTES or MAX_TEXTS. Kept arrays are copies, because those of a batch share its memory. Requests
of more than MAX_REQUEST_BYTES or MAX_TEXTS are executed: their digest would take the loop for too long.

Owner and single writer: the loop.
"""

import hashlib
from collections.abc import Sequence
from functools import partial
from itertools import count
from math import inf
from sys import getsizeof

import msgspec
import numpy as np

from oriel_inference.backends import Outputs
from oriel_inference.batching.call import Answer, BatchTimes, Call, Reply, deliver
from oriel_inference.batching.machine import Machine
from oriel_inference.batching.statistics import Statistics
from oriel_inference.errors import InferenceError
from oriel_inference.model import ModelSpec
from oriel_policies.upstreams.answer_cache import AnswerCache
from oriel_wire.v2.messages import Array

MAX_REQUEST_BYTES = 4 << 20  # digested on the loop in some 3 ms
MAX_ANSWER_BYTES = 16 << 20  # copied on the loop in some 3 ms
MAX_TEXTS = 1 << 14
ENTRY_BYTES = 1024  # of the digest and of the objects around an answer
PARAMETER_BYTES = 256
DROPPED_AT_ONCE = 1000
_loads = count()
_encode = msgspec.msgpack.Encoder().encode


class ModelCache:
    """The part of one load of a model version in the server's cache."""

    def __init__(
        self, cache: AnswerCache[Sequence[Array]], spec: ModelSpec, machine: Machine, statistics: Statistics
    ) -> None:
        self._cache = cache
        self._name = spec.name
        self._outputs = sorted([output.name for output in spec.outputs])
        self._owner = f"{spec.name}/{spec.version}/{next(_loads)}"
        self._machine = machine
        self._statistics = statistics
        self._closed = False

    def takes(self, call: Call) -> bool:
        """Return whether `call` is answered from the cache. Otherwise it has to be executed, and its answer will be
        kept.
        """
        began_s = self._machine.clock.now()
        digest = self._digest(call)
        if digest is None:
            return False
        statistics, now = self._statistics, self._machine.clock.now()
        found = self._cache.get(digest, now)
        if found is None:
            statistics.cache_miss.add(now - began_s)
            call.reply = partial(self._replied, digest, call.reply)
            return False
        statistics.cache_hit.add(now - began_s)
        self._machine.clock.call_soon(partial(self._answer, call, found[0]))
        return True

    def close(self) -> None:
        """Forget all answers, a part of them in each turn of the loop, and keep no more."""
        self._closed = True
        if self._cache.drop(self._owner, DROPPED_AT_ONCE):
            self._machine.clock.call_soon(self.close)

    def _digest(self, call: Call) -> bytes | None:
        """Return the digest of the facts that make a request equal to another; None if it is not cached."""
        names = sorted(call.inputs)
        arrays = [call.inputs[name] for name in names]
        if call.size_bytes > MAX_REQUEST_BYTES or any(map(_is_foreign, arrays)):
            return None
        seen: list[object] = []
        if call.source is not None:
            request = call.source[0]
            wanted = self._outputs if request.outputs is None else sorted([each.name for each in request.outputs])
            parameters = sorted([pair for pair in request.parameters.items() if pair[0] not in ("priority", "timeout")])
            seen = [wanted, parameters]
        shapes = [[each.dtype.str, each.shape] for each in arrays]
        found = hashlib.sha256(_encode([self._owner, names, shapes, seen]))
        for array in arrays:
            flat = array.reshape(-1)
            found.update(_encode(flat.tolist()) if array.dtype.hasobject else memoryview(flat))  # type: ignore[arg-type]  # numpy says less than it does
        return found.digest()

    def _answer(self, call: Call, outputs: Sequence[Array]) -> None:
        if call.finished:
            return
        call.finished = True
        now = self._machine.clock.now()
        self._statistics.succeeded(queue_s=now - call.arrived_s, total_s=now - call.arrived_s)
        times = BatchTimes(now, now, now, now, call.rows, steps=0)
        deliver(call, Answer(outputs, times, 0, 0, call.usage), self._name)

    def _replied(self, digest: bytes, reply: Reply, result: Answer | InferenceError) -> None:
        reply(result)
        if isinstance(result, Answer) and not self._closed:
            began_s = self._machine.clock.now()
            if (kept := _kept(result.outputs)) is not None:
                self._cache.put(digest, self._owner, *kept, began_s, inf)
            self._statistics.cache_miss.ns += int((self._machine.clock.now() - began_s) * 1e9)


def _is_foreign(array: object) -> bool:
    """Return whether a tensor is on another device, or has more texts than the loop has time for."""
    return not isinstance(array, np.ndarray) or (array.dtype.hasobject and array.size > MAX_TEXTS)


def _kept(outputs: Sequence[Array]) -> tuple[Sequence[Array], int] | None:
    """Return copies of arrays and the bytes that they take; None if they are not kept."""
    size = ENTRY_BYTES
    for array in outputs:
        if array is None:
            continue
        if _is_foreign(array):
            return None
        texts = array.reshape(-1) if array.dtype.hasobject else ()
        size += ENTRY_BYTES + array.nbytes + sum(map(getsizeof, texts))
    if size > MAX_ANSWER_BYTES:
        return None
    copies = [None if array is None else array.copy() for array in outputs]
    if type(outputs) is Outputs:
        size += PARAMETER_BYTES * len(outputs.parameters) + len(_encode(outputs.parameters))
        return Outputs(copies, outputs.parameters, datatypes=outputs.datatypes), size
    return copies, size
