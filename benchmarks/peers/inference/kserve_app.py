"""KServe's Python model server with the same ONNX session. Arguments: model file, threads, name; then its own flags."""

import sys

import numpy as np
import onnxruntime as ort
from kserve import InferOutput, InferResponse, Model, ModelServer

KINDS = {"tensor(float)": np.float32, "tensor(int64)": np.int64}


class Served(Model):
    def __init__(self, file, threads, name):
        super().__init__(name)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        self.kind = KINDS[self.session.get_inputs()[0].type]
        self.ready = True

    def load(self):
        return True

    def predict(self, payload, headers=None, response_headers=None):
        given = payload.inputs[0].as_numpy().astype(self.kind, copy=False)
        (out,) = self.session.run(None, {"x": given})
        output = InferOutput(name="y", shape=list(out.shape), datatype="FP32")
        output.set_data_from_numpy(out, binary_data=payload.from_grpc)
        return InferResponse(response_id=payload.id or "", model_name=self.name, infer_outputs=[output])


if __name__ == "__main__":
    file, threads, name = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    del sys.argv[1:4]
    ModelServer(workers=1, enable_latency_logging=False, access_log_format="").start([Served(file, threads, name)])
