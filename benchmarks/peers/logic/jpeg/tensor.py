"""A photograph becomes what an image model takes. POST a JPEG; the answer is 3 x 224 x 224 FP32, as bytes."""

from io import BytesIO

import numpy as np
from PIL import Image

from oriel_logic import Answer, Request, service

MEAN = np.array([0.485, 0.456, 0.406], np.float32)
DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)


@service
def tensor(request: Request) -> Answer:
    return Answer(body=prepare(request.body).tobytes())


def prepare(jpeg: bytes) -> np.ndarray:
    """[3, 224, 224] FP32, normalised as torchvision's models want it."""
    picture = Image.open(BytesIO(jpeg)).convert("RGB").resize((224, 224), Image.Resampling.BILINEAR)
    pixels = (np.asarray(picture, np.float32) / 255.0 - MEAN) / DEVIATION
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))
