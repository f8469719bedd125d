"""MLServer's custom runtime with the same ONNX session. The parameters' `extra` holds the number of threads."""

import onnxruntime as ort
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse

KINDS = {"tensor(float)": "float32", "tensor(int64)": "int64"}


class Model(MLModel):
    async def load(self) -> bool:
        parameters = self.settings.parameters
        options = ort.SessionOptions()
        options.intra_op_num_threads = parameters.extra["threads"]
        self._session = ort.InferenceSession(parameters.uri, options, providers=["CPUExecutionProvider"])
        self._kind = KINDS[self._session.get_inputs()[0].type]
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        given = NumpyCodec.decode_input(payload.inputs[0]).astype(self._kind, copy=False)
        (out,) = self._session.run(None, {"x": given})
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("y", out)])
