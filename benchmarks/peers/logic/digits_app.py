"""The example service `digits` as one writes it with FastAPI, a thread pool and Triton's client. TARGET: host:port of
gRPC. EXAMPLE: the folder of the example, whose `prepare` both contenders call.
"""

import os
from contextlib import asynccontextmanager
from io import BytesIO

import numpy as np
import tritonclient.grpc.aio as triton
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from PIL import Image

SOURCE = open(os.path.join(os.environ["EXAMPLE"], "digits.py")).read()
PREPARE = {"np": np, "Image": Image, "Refused": ValueError}
exec(SOURCE[SOURCE.index("def prepare") :], PREPARE)  # the rest of the file needs Oriel


@asynccontextmanager
async def lifespan(app: FastAPI):
    async with triton.InferenceServerClient(os.environ["TARGET"]) as client:
        app.state.client = client
        yield


app = FastAPI(lifespan=lifespan)


def pre(body: bytes) -> np.ndarray:
    return PREPARE["prepare"](np.asarray(Image.open(BytesIO(body)).convert("L"), np.float32) / 255)


@app.post("/v1/services/digits")
async def digits(request: Request):
    image = triton.InferInput("image", [1, 64], "FP32")
    image.set_data_from_numpy(await run_in_threadpool(pre, await request.body()))
    answer = await request.app.state.client.infer("digits", [image])
    label, probabilities = int(answer.as_numpy("label")[0, 0]), answer.as_numpy("probabilities")[0].tolist()
    version = answer.get_response().model_version
    return {
        "label": label,
        "confidence": probabilities[label],
        "probabilities": probabilities,
        "model_version": version,
    }
