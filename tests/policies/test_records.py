"""Values of the rules cannot be changed by whoever holds them, and have no attributes beside their fields."""

import dataclasses
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator

import oriel_policies

# Records that their owner counts in, and one that keeps a number it has computed once.
COUNTED = {"Answer", "Ask", "Counts", "Demand", "DeviceHour", "Plan", "Record", "TierLoad", "_Entry", "_Slot"}
COMPUTED = {"Bound"}


def records() -> Iterator[type]:
    for found in pkgutil.walk_packages(oriel_policies.__path__, "oriel_policies."):
        for each in vars(importlib.import_module(found.name)).values():
            if inspect.isclass(each) and each.__module__ == found.name and dataclasses.is_dataclass(each):
                yield each


def test_records_are_frozen_unless_their_owner_counts_in_them() -> None:
    assert {each.__name__ for each in records() if not each.__dataclass_params__.frozen} == COUNTED  # type: ignore[attr-defined]


def test_records_have_no_attributes_beside_their_fields() -> None:
    plain = [each for each in records() if str(sys.modules[each.__module__].__file__).endswith(".py")]  # not compiled
    assert {each.__name__ for each in plain if "__slots__" not in vars(each)} <= COMPUTED
