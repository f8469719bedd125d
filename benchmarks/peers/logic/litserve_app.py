"""The service of the bench in LitServe, asynchronous. TARGET: host:port of gRPC. Argument: port."""

import os
import sys

import litserve as ls
import numpy as np
import tritonclient.grpc.aio as triton


class Label(ls.LitAPI):
    def setup(self, device):
        self.client = None

    async def decode_request(self, request):
        return np.array([request["image"]], np.float32)

    async def predict(self, x):
        if self.client is None:  # in `setup` there is no loop yet, and the channel belongs to one
            self.client = triton.InferenceServerClient(os.environ["TARGET"])
        image = triton.InferInput("image", [1, 64], "FP32")
        image.set_data_from_numpy(x)
        return await self.client.infer("digits", [image])

    async def encode_response(self, output):
        return {"label": int(output.as_numpy("label")[0, 0])}


if __name__ == "__main__":
    server = ls.LitServer(Label(enable_async=True, api_path="/label"), accelerator="cpu", workers_per_device=1)
    server.run(port=int(sys.argv[1]), host="127.0.0.1", generate_client_file=False, log_level="error")
