"""The permits of a pool that a slow model may have, so that the other models of the pool find one.

A call of a slow model holds its permit so long that the next call of a quick one would wait for it, even if only the
permits that nobody else wants are given to the slow model. So a model leaves as many permits free as the models that
are several times quicker lately needed at once. It may always have its share: the permits divided by the number of
models in use. A model whose calls end quickly, and one that is alone, may have all permits.
"""

RECENT_S = 10.0
QUICK_S = 0.03
SLOWER = 3.0
MAX_MODELS = 64
_ALPHA = 0.1


class _Use:
    """The use of a pool by one model.

    count: the model's permits now.
    most, before: its highest number of permits in this period and in the one before.
    mean_s: mean seconds for which a call holds a permit.
    ended_s: the time when the model last released a permit, or got its only one.
    """

    def __init__(self) -> None:
        self.count = self.most = self.before = 0
        self.ended_s = self.mean_s = 0.0


class ModelShares:
    """The permits in use by model, of models that had one lately. A period is `RECENT_S` long.

    At most `MAX_MODELS` are counted; others may have all permits meanwhile.
    """

    def __init__(self) -> None:
        self._uses: dict[str, _Use] = {}
        self._turn_s = 0.0  # when the next period begins

    def allows(self, model: str, free: int, limit: int, now: float) -> bool:
        """Return whether a call of the model may have one of the free permits, of `limit` in all."""
        if now >= self._turn_s:
            self._turn_s = now + RECENT_S
            self._uses = {name: use for name, use in self._uses.items() if use.most}
            for use in self._uses.values():
                use.before, use.most = use.most, use.count
        uses = self._uses
        own = uses.get(model)
        if own is None or not own.count or len(uses) == 1:
            return True
        pace_s = max(own.mean_s, now - own.ended_s)
        if pace_s < QUICK_S or own.count < limit // len(uses):
            return True
        quicker = [use for use in uses.values() if use is not own and use.mean_s * SLOWER < pace_s]
        return free > sum([max(use.most, use.before) - use.count for use in quicker])

    def acquire(self, model: str, free: int, limit: int, now: float) -> bool:
        """Count a permit for a call of the model if `allows` does."""
        if (now >= self._turn_s or len(self._uses) > 1) and not self.allows(model, free, limit, now):
            return False
        use = self._uses.get(model)
        if use is None:
            if len(self._uses) >= MAX_MODELS:
                return True
            use = self._uses[model] = _Use()
        if not use.count:
            use.ended_s = now
        use.count = count = use.count + 1
        if count > use.most:
            use.most = count
        return True

    def release(self, model: str, took_s: float, now: float) -> None:
        """Count a permit that is free again. took_s: seconds that a call had it, 0.0 if it was not used."""
        use = self._uses.get(model)
        if use is None or not use.count:
            return
        use.count -= 1
        if took_s:
            use.ended_s = now
            use.mean_s += (_ALPHA if use.mean_s else 1.0) * (took_s - use.mean_s)
