"""`dynamic_batching` of a model configuration: checks it, and turns it into the values that the batcher uses."""

from collections.abc import Callable

from oriel_inference.errors import ConfigInvalid
from oriel_inference.model import QueuePolicy, QueueRules
from oriel_wire.v2.proto import model_config_pb2 as pb

MAX_PRIORITY_LEVELS = 256

_Refuse = Callable[[str, str], ConfigInvalid]


def check_queueing(batching: pb.ModelDynamicBatching, max_batch_size: int, refuse: _Refuse) -> None:
    """Check the section. Raises the exception that `refuse` makes of a field and a reason."""
    for index, size in enumerate(batching.preferred_batch_size):
        if not 1 <= size <= max_batch_size:
            raise refuse(
                f"dynamic_batching.preferred_batch_size[{index}]",
                f"{size} does not lie between 1 and max_batch_size {max_batch_size}",
            )
    levels, default = batching.priority_levels, batching.default_priority_level
    if levels > MAX_PRIORITY_LEVELS:
        raise refuse("dynamic_batching.priority_levels", f"must be at most {MAX_PRIORITY_LEVELS}")
    if levels and not 1 <= default <= levels:
        raise refuse("dynamic_batching.default_priority_level", f"must lie between 1 and priority_levels {levels}")
    for level in sorted(batching.priority_queue_policy):
        if not 1 <= level <= levels:
            reason = f"lies outside 1 to priority_levels {levels}" if levels else "needs priority_levels"
            raise refuse(f"dynamic_batching.priority_queue_policy[{level}]", reason)
    if batching.preserve_ordering:
        _check_order(batching, refuse)


def queue_rules(config: pb.ModelConfig) -> QueueRules:
    """Return the queue rules of a configuration. They hold whatever its scheduler, because every model has a queue."""
    batching = config.dynamic_batching
    return QueueRules(
        policy=_policy(batching.default_queue_policy),
        by_level={level: _policy(each) for level, each in sorted(batching.priority_queue_policy.items())},
        priority_levels=batching.priority_levels,
        default_priority=batching.default_priority_level,
        preserve_ordering=batching.preserve_ordering,
    )


def _check_order(batching: pb.ModelDynamicBatching, refuse: _Refuse) -> None:
    if batching.priority_levels > 1:
        raise refuse("dynamic_batching.preserve_ordering", "allows only one priority level")
    policies = (batching.default_queue_policy, *batching.priority_queue_policy.values())
    if any(_policy(each).delays for each in policies):
        raise refuse("dynamic_batching.preserve_ordering", "contradicts a queue policy with timeout_action DELAY")


def _policy(given: pb.ModelQueuePolicy) -> QueuePolicy:
    timeout_us = given.default_timeout_microseconds
    return QueuePolicy(
        max_items=given.max_queue_size,
        timeout_s=timeout_us / 1e6 if timeout_us else None,
        delays=bool(timeout_us) and given.timeout_action == pb.ModelQueuePolicy.DELAY,
        allow_override=given.allow_timeout_override,
    )
