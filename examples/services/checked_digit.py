"""Recognises a digit, unless the picture is empty. POST a PNG or JPEG, or JSON {"image": "<base64>"}."""

from typing import TypedDict

from digits import prepare  # the file beside this one
from PIL import Image

from oriel_logic import Context, Models, images, service


class Digit(TypedDict, total=False):
    """`label` and `confidence`, with `probabilities` for callers of the tier gold; or `blank` and `reason`."""

    label: int
    confidence: float
    probabilities: list[float]
    blank: bool
    reason: str


@service(timeout_s=5.0)
def checked_digit(image: Image.Image, models: Models, ctx: Context) -> Digit:
    """The digit in a picture, or why there is none to be read."""
    grey = images.grey(image)
    if grey.max() - grey.min() <= 0.2:  # an empty picture is not worth a model's time
        return {"blank": True, "reason": "the picture is empty"}
    outputs = models.infer("digits", {"image": prepare(grey)})
    probabilities = outputs["probabilities"][0].tolist()
    answer: Digit = {"label": int(outputs["label"][0, 0]), "confidence": max(probabilities)}
    if ctx.tier == "gold":
        answer["probabilities"] = probabilities
    return answer
