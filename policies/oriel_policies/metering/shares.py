"""Splits a whole number into whole shares by the method of the largest remainder (Hamilton)."""

from collections.abc import Sequence


def split(total: int, weights: Sequence[int]) -> list[int]:
    """Return one share per weight, in proportion to the weights; their sum is `total`.

    total: units, at least 0. weights: each at least 0. If all of them are 0, they count as equal. The earlier one of
    equal remainders is rounded up. Raises ValueError without weights, because then nobody would get the total.
    """
    count = len(weights)
    if count == 1:
        return [total]
    if not count:
        raise ValueError("nothing to split among")
    first = weights[0]
    if weights.count(first) == count:
        share, more = divmod(total, count)
        return [share + 1] * more + [share] * (count - more)
    whole = sum(weights)
    shares = []
    remainders = []
    for weight in weights:
        share, remainder = divmod(total * weight, whole)
        shares.append(share)
        remainders.append(remainder)
    missing = total - sum(shares)
    for index in sorted(range(count), key=remainders.__getitem__, reverse=True)[:missing]:
        shares[index] += 1
    return shares
