"""MLServer's custom runtime with the same ONNX session."""

import numpy as np
import onnxruntime as ort
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class Tiny(MLModel):
    async def load(self) -> bool:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = ort.InferenceSession(self.settings.parameters.uri, options, providers=["CPUExecutionProvider"])
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        given = NumpyCodec.decode_input(payload.inputs[0]).astype(np.float32)
        (out,) = self._session.run(None, {"x": given})
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("y", out)])
