"""Passes its input on to the model that its parameter `to` names, and returns that model's answer."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.to = json.loads(args["model_config"])["parameters"]["to"]["string_value"]

    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x")
        asked = pb_utils.InferenceRequest(model_name=self.to, requested_output_names=["y"], inputs=[x])
        answer = asked.exec()
        if answer.has_error():
            return pb_utils.InferenceResponse(error=answer.error())
        y = np.array(pb_utils.get_output_tensor_by_name(answer, "y").as_numpy())
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", y)])
