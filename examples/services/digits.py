"""Recognises a digit. POST a PNG or JPEG of one handwritten digit, or JSON {"image": "<base64>"}."""

from dataclasses import dataclass

import numpy as np
from PIL import Image

from oriel_logic import Outputs, Refused, images, service


@dataclass
class Digit:
    label: int
    confidence: float
    probabilities: list[float]
    model_version: str


@service
class Digits:
    """Reads one handwritten digit, dark on light or light on dark."""

    model = "digits"

    def pre(self, image: Image.Image) -> dict[str, np.ndarray]:
        return {"image": prepare(images.grey(image))}

    async def post(self, outputs: Outputs) -> Digit:
        label, probabilities = int(outputs["label"][0, 0]), outputs["probabilities"][0].tolist()
        return Digit(label, probabilities[label], probabilities, outputs.model_version)


def prepare(grey: np.ndarray) -> np.ndarray:
    """[height, width] 0 black .. 1 white -> [1, 64] FP32, 0 paper .. 1 ink: the 8x8 the model was trained on.

    The digit is cut out, centred on a square of paper and shrunk by averaging, as the training scans were.
    """
    edge = np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
    ink = grey if edge.mean() < (grey.min() + grey.max()) / 2 else 1 - grey
    ink = ink - ink.min()
    if ink.max() < 0.1:
        raise Refused("the image is blank: send one dark digit on light paper, or a light one on dark")
    ink = ink / ink.max()
    rows, columns = (np.flatnonzero((ink > 0.3).any(axis)) for axis in (1, 0))
    digit = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    side = max(digit.shape)
    above, left = ((side - length) // 2 for length in digit.shape)
    square = np.zeros((side, side), np.float32)
    square[above : above + digit.shape[0], left : left + digit.shape[1]] = digit
    small = Image.fromarray(square).resize((8, 8), Image.Resampling.BOX)
    return np.asarray(small, np.float32).reshape(1, 64)
