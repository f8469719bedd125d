"""LitServe with the same ONNX session and its own batching. Arguments: model file, port."""

import sys

import litserve as ls
import numpy as np
import onnxruntime as ort


class Tiny(ls.LitAPI):
    def setup(self, device):
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])

    def decode_request(self, request):
        return np.asarray(request["inputs"][0]["data"], np.float32)

    def batch(self, inputs):
        return np.stack(inputs)

    def predict(self, x):
        return self.session.run(None, {"x": x})[0]

    def unbatch(self, output):
        return list(output)

    def encode_response(self, output):
        return {"outputs": [{"name": "y", "shape": [1, 4], "datatype": "FP32", "data": output.tolist()}]}


if __name__ == "__main__":
    api = Tiny(max_batch_size=32, batch_timeout=0.001)
    server = ls.LitServer(api, accelerator="cpu", workers_per_device=1)
    server.run(port=int(sys.argv[2]), host="127.0.0.1", generate_client_file=False, log_level="error")
