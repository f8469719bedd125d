"""The service of the bench in BentoML, asynchronous. TARGET: host:port of gRPC."""

import os

import bentoml
import numpy as np
import tritonclient.grpc.aio as triton


@bentoml.service(workers=1, metrics={"enabled": False}, logging={"access": {"enabled": False}})
class Label:
    def __init__(self) -> None:
        self.client: triton.InferenceServerClient | None = None

    @bentoml.api(route="/label")
    async def label(self, image: list[float]) -> dict[str, int]:
        if self.client is None:  # in `__init__` there is no loop yet, and the channel belongs to one
            self.client = triton.InferenceServerClient(os.environ["TARGET"])
        tensor = triton.InferInput("image", [1, 64], "FP32")
        tensor.set_data_from_numpy(np.array([image], np.float32))
        answer = await self.client.infer("digits", [tensor])
        return {"label": int(answer.as_numpy("label")[0, 0])}
