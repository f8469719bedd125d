"""The service of the bench with nothing between ASGI and grpc.aio: the least code. TARGET: host:port of gRPC."""

import json
import os

import grpc.aio
import numpy as np
from tritonclient.grpc import service_pb2

HEADERS = [(b"content-type", b"application/json")]


class App:
    def __init__(self) -> None:
        self.infer = None

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "lifespan":
            await self.lifespan(receive, send)
            return
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        image = np.array([json.loads(body)["image"]], np.float32)
        call = service_pb2.ModelInferRequest(model_name="digits", raw_input_contents=[image.tobytes()])
        call.inputs.add(name="image", datatype="FP32", shape=[1, 64])
        answer = await self.infer(call)
        index = [output.name for output in answer.outputs].index("label")
        label = int(np.frombuffer(answer.raw_output_contents[index], np.int64)[0])
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await send({"type": "http.response.body", "body": json.dumps({"label": label}).encode()})

    async def lifespan(self, receive, send) -> None:
        await receive()
        async with grpc.aio.insecure_channel(os.environ["TARGET"]) as channel:
            self.infer = channel.unary_unary(
                "/inference.GRPCInferenceService/ModelInfer",
                request_serializer=service_pb2.ModelInferRequest.SerializeToString,
                response_deserializer=service_pb2.ModelInferResponse.FromString,
            )
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})


app = App()
