"""`GET /v2/repository/memory`: what a gateway needs to place models on servers, and to show how far a start has come.

| field | meaning |
|---|---|
| `up_s` | seconds since the start of the process |
| `loading` | bytes that the loads of this moment have brought, and all they have to bring |
| `budgets`, `fixed` | device -> bytes for all models; bytes of models that cannot be moved |
| `models` | models that a call loads: `state`, `bytes` by device, `load_s`, `busy_s`, `calls`, `waiting`, `wanted` |

`busy_s` counts seconds in which the model would have kept the whole server busy, since the start. `bytes` is empty
while no load has shown them. `wanted`: it has found no memory lately. An ensemble and the models of its steps belong
together and are not listed; their bytes are among the `fixed` ones.
"""

import time
from collections import Counter
from typing import Any, Final

from oriel_inference.catalog import ServingModel
from oriel_inference.servers.surface import Surface

_BEGAN_S: Final = time.monotonic()


def memory_report(surface: Surface) -> dict[str, Any]:
    """Return the report; see the module's docstring."""
    catalog, control = surface.catalog, surface.control
    memory = control.memory
    together = control.rollout.in_ensembles()
    served: dict[str, list[ServingModel]] = {}
    for serving in catalog.serving():
        served.setdefault(serving.spec.name, []).append(serving)
    movable = sorted(name for name in catalog.on_demand if name not in together)
    fixed: Counter[str] = Counter()
    for name in served.keys() - set(movable):
        fixed.update(memory.sizes_of(name))
    waiting, wanted = control.demand.waiting, memory.wanted
    return {
        "up_s": round(time.monotonic() - _BEGAN_S, 3),
        "loading": [control.loader.progress.done_bytes, control.loader.progress.total_bytes],
        "budgets": {device: budget for device, (budget, _, _) in memory.bytes.items()},
        "fixed": dict(fixed),
        "models": [_line(name, served.get(name, []), surface, waiting.get(name), name in wanted) for name in movable],
    }


def _line(name: str, served: list[ServingModel], surface: Surface, waiting: int | None, wanted: bool) -> dict[str, Any]:
    control = surface.control
    busy_s = sum(
        stages.infer.ns * each.batcher.share for each in served for stages in each.batcher.statistics.batches.values()
    )
    loading = waiting is not None or control.rollout.is_loading(name)
    return {
        "name": name,
        "state": "loading" if loading and not served else "loaded" if served else "available",
        "bytes": control.memory.sizes_of(name),
        "load_s": round(sum(each.load_s for each in served), 3),
        "busy_s": round(busy_s / 1e9, 6),
        "calls": sum(
            each.batcher.statistics.success.count + sum(each.batcher.statistics.failures.values()) for each in served
        ),
        "waiting": (waiting or 0) + sum(each.batcher.pending for each in served),
        "wanted": wanted,
    }
