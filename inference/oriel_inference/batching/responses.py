"""Counts the responses of one decoupled request in the statistics of its model. Used on the loop."""

from oriel_inference.batching.statistics import Statistics


class Responses:
    """The responses of one request. arrived_s: when the request was queued."""

    __slots__ = ("_arrived_s", "_number", "_statistics")

    def __init__(self, statistics: Statistics, arrived_s: float) -> None:
        self._statistics = statistics
        self._arrived_s = arrived_s
        self._number = 0

    def sent(self, now: float, infer_s: float, output_s: float) -> None:
        """Count a response on its way to a caller that waits. infer_s, output_s: time to compute it and to encode
        it.
        """
        if not self._number:
            self._statistics.first_response.observe((now - self._arrived_s) * 1000.0)
        response = self._statistics.response(self._number)
        self._number += 1
        if response is not None:
            response.infer.add(infer_s)
            response.output.add(output_s)
            response.success.add(infer_s + output_s)

    def ended(self, infer_s: float, *, failed: bool, cancelled: bool) -> None:
        """Count the end of the responses, `infer_s` after the last one. cancelled: the caller had left."""
        response = self._statistics.response(self._number)
        if response is None:
            return
        if cancelled:
            response.cancel.add(infer_s)
            return
        response.infer.add(infer_s)
        (response.fail if failed else response.empty).add(infer_s)
