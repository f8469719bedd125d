"""The service of the bench in Oriel: 64 floats in, the label out."""

from dataclasses import dataclass

import numpy as np

from oriel_logic import Models, service


@dataclass
class Label:
    label: int


@service
async def label(image: list[float], models: Models) -> Label:
    outputs = await models.infer("digits", {"image": np.array([image], np.float32)})
    return Label(label=int(outputs["label"][0, 0]))
