"""`metric_tags` and `model_metrics` of a model configuration."""

import re
from collections.abc import Callable
from math import isfinite

from oriel_inference.errors import ConfigInvalid
from oriel_wire.v2.proto import model_config_pb2 as pb

FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"
MAX_TAGS = 16
MAX_TAG_VALUE = 128
MAX_BUCKETS = 64
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_]{0,63}\Z")


def check_metrics(config: pb.ModelConfig, refuse: Callable[[str, str], ConfigInvalid]) -> None:
    """Refuse tags that are not valid labels, and invalid buckets. Raises ConfigInvalid."""
    if len(config.metric_tags) > MAX_TAGS:
        raise refuse("metric_tags", f"has {len(config.metric_tags)} tags, at most {MAX_TAGS} are allowed")
    for name, value in config.metric_tags.items():
        field = f"metric_tags[{name[:64]!r}]"
        if not _TAG.match(name):
            raise refuse(field, "the key must be a label name: letters, digits and _, at most 64 of them")
        if len(value) > MAX_TAG_VALUE:
            raise refuse(field, f"the value has {len(value)} characters, at most {MAX_TAG_VALUE} are allowed")
    for index, control in enumerate(config.model_metrics.metric_control):
        field = f"model_metrics.metric_control[{index}]"
        if not control.metric_identifier.family:
            raise refuse(f"{field}.metric_identifier.family", "is missing")
        buckets = list(control.histogram_options.buckets)
        if len(buckets) > MAX_BUCKETS or not all(map(isfinite, buckets)) or buckets != sorted(set(buckets)):
            raise refuse(f"{field}.histogram_options.buckets", f"must be at most {MAX_BUCKETS} ascending numbers")


def other_families(config: pb.ModelConfig) -> dict[str, bool]:
    """Return the fields of `model_metrics` that name a metric without configurable buckets here: they have no
    effect.
    """
    return {
        f"model_metrics.metric_control[{index}]": control.metric_identifier.family != FIRST_RESPONSE
        for index, control in enumerate(config.model_metrics.metric_control)
    }


def first_response_buckets(config: pb.ModelConfig) -> tuple[float, ...]:
    """Return the upper bounds of FIRST_RESPONSE in milliseconds from a checked configuration; empty if it has none."""
    found: tuple[float, ...] = ()
    for control in config.model_metrics.metric_control:
        if control.metric_identifier.family == FIRST_RESPONSE:
            found = tuple(control.histogram_options.buckets) or found
    return found
