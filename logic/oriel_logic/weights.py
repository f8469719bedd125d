"""Which version of a service a request gets. Pure.

The choice is made by the request's id and the service's name, so a retry, or the same request at another replica,
goes the same way, and is independent of how a gateway has split the same ids before.
"""

from bisect import bisect_right
from collections.abc import Mapping
from hashlib import blake2b

__all__ = ["Shares"]


class Shares:
    """weights: version -> share, in any unit; versions with 0 are asked for by name only. At least one is more.

    only: the version that has all of it, "" if there are several.
    """

    __slots__ = ("_bounds", "_salt", "_versions", "only", "weights")

    def __init__(self, service: str, weights: Mapping[str, int]) -> None:
        self._salt = blake2b(service.encode(), digest_size=16).digest()
        self._versions: list[str] = []
        self._bounds: list[int] = []
        total = 0
        for version, weight in sorted(weights.items()):
            if weight > 0:
                total += weight
                self._versions.append(version)
                self._bounds.append(total)
        if not self._versions:
            raise ValueError("no version has a share")
        self.weights = {version: weight for version, weight in weights.items() if weight > 0}
        self.only = self._versions[0] if len(self._versions) == 1 else ""

    def pick(self, key: str) -> str:
        """The version for this request id; the same one every time."""
        if self.only:
            return self.only
        digest = blake2b(key.encode("utf-8", "replace"), digest_size=8, salt=self._salt).digest()
        place = int.from_bytes(digest) * self._bounds[-1] >> 64
        return self._versions[bisect_right(self._bounds, place)]
