"""The value of the external metric that makes a HorizontalPodAutoscaler act on the wanted number of replicas."""

from math import ceil

_TOLERANCE = 0.1
_BEYOND = 0.01  # the metric is kept to 1/1000


def reported_value(replicas: int, wanted: int) -> float:
    """The value to report for a metric of type AverageValue with target 1.

    replicas: addresses of the pool that are not terminating. The HorizontalPodAutoscaler changes nothing while the
    value is within a tenth of the present number. So a smaller change is reported as just beyond the tolerance. A rise
    may then start one replica in ten more than wanted; a fall that would leave fewer than wanted is not reported.
    Exactly a tenth is within the tolerance here; versions of Kubernetes differ in it.
    """
    change = wanted - replicas
    if replicas <= 0 or not change or abs(change) > _TOLERANCE * replicas + 1e-9:
        return float(wanted)
    if change > 0:
        return (1.0 + _TOLERANCE) * replicas + _BEYOND
    least = (1.0 - _TOLERANCE) * replicas - _BEYOND
    return least if ceil(least) >= wanted else float(replicas)
