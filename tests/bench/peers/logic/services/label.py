"""The service of the bench in Oriel: 64 floats in, the label out."""

import numpy as np

from oriel_logic import service


@service
async def label(request, models, ctx):
    image = np.array([request.json()["image"]], np.float32)
    outputs = await models.infer("digits", {"image": image})
    return {"label": int(outputs["label"][0, 0])}
