"""A decoupled model: one response of zeros in the shape that the request names; "float" gives another datatype."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            shape = json.loads(pb_utils.get_input_tensor_by_name(request, "shape").as_numpy().flat[0])
            array = np.zeros((1, 2), np.float32) if shape == "float" else np.zeros(shape, np.int32)
            response = pb_utils.InferenceResponse([pb_utils.Tensor("i", array)])
            request.get_response_sender().send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
