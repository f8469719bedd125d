"""The behaviour of a HorizontalPodAutoscaler and of KEDA, as far as it decides about numbers of replicas."""

from collections import deque
from math import ceil

PERIOD_S = 15
TOLERANCE = 0.1


class HorizontalPodAutoscaler:
    """One decision every PERIOD_S. up_percent, up_pods: the most that is added in one period, whichever is more.

    settle_s: the number falls only to the largest one that was wanted in this time (stabilizationWindowSeconds).
    """

    def __init__(self, *, minimum: int, maximum: int, up_percent: int, up_pods: int, settle_s: float) -> None:
        self._minimum = max(1, minimum)
        self._maximum = maximum
        self._up_percent = up_percent
        self._up_pods = up_pods
        self._settle_s = settle_s
        self._wishes: deque[tuple[float, int]] = deque()

    def by_average_value(self, value: float, replicas: int, now: float) -> int:
        """Return the new number of replicas for an external metric of type AverageValue with target 1."""
        if abs(1.0 - value / replicas) <= TOLERANCE:
            return self._settled(replicas, replicas, now)
        return self._settled(ceil(value), replicas, now)

    def by_utilisation(self, busy: float, target: float, ready: int, replicas: int, now: float) -> int:
        """Return the new number of replicas for a resource metric.

        busy: CPU in use, in units of one replica. Replicas that are not ready count as idle before the number is
        raised, which
        dampens a rise.
        """
        ratio = busy / max(1, ready) / target
        counted = ready
        if ratio > 1.0 and replicas > ready:
            ratio, counted = busy / replicas / target, replicas
            if ratio < 1.0:
                return self._settled(replicas, replicas, now)
        if abs(1.0 - ratio) <= TOLERANCE:
            return self._settled(replicas, replicas, now)
        return self._settled(ceil(ratio * counted - 1e-9), replicas, now)

    def _settled(self, wish: int, replicas: int, now: float) -> int:
        self._wishes.append((now, wish))
        while now - self._wishes[0][0] > self._settle_s:
            self._wishes.popleft()
        if wish < replicas:
            wish = min(replicas, max(each for _, each in self._wishes))
        most = max(replicas + self._up_pods, replicas + replicas * self._up_percent // 100)
        return max(self._minimum, min(self._maximum, wish, most))


class Activation:
    """KEDA's switch between no replica and one: up as soon as the scaler reports activity, down at a poll after
    `cooldown_s`
    without any.
    """

    POLLING_S = 5

    def __init__(self, cooldown_s: float = 30.0) -> None:
        self._cooldown_s = cooldown_s
        self._active_s = 0.0

    def replicas(self, active: bool, replicas: int, second: int) -> int:
        """Return the number of replicas after this second."""
        if active:
            self._active_s = float(second)
            return max(1, replicas)
        if second % self.POLLING_S == 0 and second - self._active_s >= self._cooldown_s:
            return 0
        return replicas
