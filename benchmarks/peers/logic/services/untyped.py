"""The same service, which reads the body itself: what typed parameters cost."""

import numpy as np

from oriel_logic import service


@service
async def untyped(request, models, ctx):
    outputs = await models.infer("digits", {"image": np.array([request.json()["image"]], np.float32)})
    return {"label": int(outputs["label"][0, 0])}
