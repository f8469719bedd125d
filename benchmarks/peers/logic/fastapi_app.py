"""The service of the bench as one writes it with FastAPI and Triton's asyncio client. TARGET: host:port of gRPC."""

import os
from contextlib import asynccontextmanager

import numpy as np
import tritonclient.grpc.aio as triton
from fastapi import FastAPI, Request
from pydantic import BaseModel


class Picture(BaseModel):
    image: list[float]


class Label(BaseModel):
    label: int


@asynccontextmanager
async def lifespan(app: FastAPI):
    async with triton.InferenceServerClient(os.environ["TARGET"]) as client:
        app.state.client = client
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/label")
async def label(picture: Picture, request: Request) -> Label:
    image = triton.InferInput("image", [1, 64], "FP32")
    image.set_data_from_numpy(np.array([picture.image], np.float32))
    answer = await request.app.state.client.infer("digits", [image])
    return Label(label=int(answer.as_numpy("label")[0, 0]))
