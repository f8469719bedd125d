"""The same with the request as it came: what reading it by hand saves."""

import numpy as np

from oriel_logic import service


@service
async def untyped(request, models, ctx):
    outputs = await models.infer("digits", {"image": np.array([request.json()["image"]], np.float32)})
    return {"label": int(outputs["label"][0, 0])}
