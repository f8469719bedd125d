"""The functions of checked_digit.toml. A dict is a step's outputs by name."""

from typing import Any, NotRequired, TypedDict

from digits import prepare as eight_by_eight  # the file beside this one

from oriel_logic import Request, images


class Digit(TypedDict):
    """The answer; with `probabilities` for callers of the tier gold."""

    label: int
    confidence: float
    probabilities: NotRequired[list[float]]


def prepare(request: Request) -> dict[str, Any]:
    """image: as the model takes it; contrast: between the darkest and the lightest point, 0 to 1."""
    grey = images.grey(images.read(images.image_bytes(request, field="image")))
    contrast = float(grey.max() - grey.min())
    return {"contrast": contrast, "image": eight_by_eight(grey) if contrast > 0.2 else None}


def describe(label: Any, probabilities: Any, tier: str) -> Digit:
    answer: Digit = {"label": int(label[0, 0]), "confidence": float(probabilities.max())}
    if tier == "gold":
        answer["probabilities"] = probabilities[0].tolist()
    return answer
