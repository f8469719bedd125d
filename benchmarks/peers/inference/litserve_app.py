"""LitServe with the same ONNX session and its own batching. Arguments: model file, threads, port."""

import sys

import litserve as ls
import numpy as np
import onnxruntime as ort

KINDS = {"tensor(float)": np.float32, "tensor(int64)": np.int64}


class Model(ls.LitAPI):
    def setup(self, device):
        options = ort.SessionOptions()
        options.intra_op_num_threads = int(sys.argv[2])
        self.session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
        (given,) = self.session.get_inputs()
        self.kind, self.dims = KINDS[given.type], given.shape[1:]

    def decode_request(self, request):
        return np.asarray(request["inputs"][0]["data"], self.kind).reshape(self.dims)

    def batch(self, inputs):
        return np.stack(inputs)

    def predict(self, x):
        return self.session.run(None, {"x": x})[0]

    def unbatch(self, output):
        return list(output)

    def encode_response(self, output):
        shape = [1, *output.shape]
        return {"outputs": [{"name": "y", "shape": shape, "datatype": "FP32", "data": output.tolist()}]}


if __name__ == "__main__":
    api = Model(max_batch_size=64, batch_timeout=0.001)
    server = ls.LitServer(api, accelerator="cpu", workers_per_device=1)
    server.run(port=int(sys.argv[3]), host="127.0.0.1", generate_client_file=False, log_level="error")
