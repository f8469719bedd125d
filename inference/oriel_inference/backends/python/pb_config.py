"""`pb_utils.ModelConfig`: the object that `auto_complete_config` gets, changes and returns."""

import copy
import json
from collections.abc import Mapping
from typing import Any

from oriel_inference.backends.python.pb_errors import TritonModelException


class ModelConfig:
    """A model configuration that may be completed but not contradicted."""

    def __init__(self, model_config: str) -> None:
        self._config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        """Return a copy of the configuration as it is now."""
        return copy.deepcopy(self._config)

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set the largest batch that the model accepts; a configuration that asks for more is refused."""
        current = int(self._config.get("max_batch_size", 0))
        if current > max_batch_size:
            raise TritonModelException(
                f"the configuration has max_batch_size {current}, the model takes at most {max_batch_size}"
            )
        self._config["max_batch_size"] = int(max_batch_size)

    def set_dynamic_batching(self) -> None:
        """Use the default batcher, unless another scheduler is configured."""
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in self._config:
                raise TritonModelException(f"the configuration has {other}, dynamic_batching cannot be set")
        self._config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy: Mapping[str, Any]) -> None:
        """Set the transaction policy: `{"decoupled": True}` or False."""
        unknown = set(transaction_policy) - {"decoupled"}
        if unknown:
            raise TritonModelException(f"model transaction policy: unknown property {sorted(unknown)[0]!r}")
        wanted = bool(transaction_policy.get("decoupled", False))
        current = self._config.get("model_transaction_policy", {}).get("decoupled")
        if current is not None and bool(current) and not wanted:
            raise TritonModelException("the configuration says decoupled, the model sets the opposite")
        self._config["model_transaction_policy"] = {"decoupled": wanted}

    def add_input(self, input: Mapping[str, Any]) -> None:
        """Add an input: `{"name", "data_type", "dims"}`, perhaps `optional` and other fields. An equal input may be
        added again.
        """
        self._add("input", input)

    def add_output(self, output: Mapping[str, Any]) -> None:
        self._add("output", output)

    def _add(self, kind: str, tensor: Mapping[str, Any]) -> None:
        for field in ("name", "data_type", "dims"):
            if field not in tensor:
                raise TritonModelException(f"{kind} {tensor.get('name', '')!r} has no {field}")
        tensors: list[dict[str, Any]] = self._config.setdefault(kind, [])
        for known in tensors:
            if known["name"] == tensor["name"]:
                for field in ("data_type", "dims"):
                    if known[field] != (list(tensor[field]) if field == "dims" else tensor[field]):
                        raise TritonModelException(
                            f"{kind} {tensor['name']!r}: the configuration has {field} {known[field]}, "
                            f"the model {tensor[field]}"
                        )
                known.update({key: value for key, value in tensor.items() if key not in ("name", "data_type", "dims")})
                return
        tensors.append({**tensor, "dims": list(tensor["dims"])})
