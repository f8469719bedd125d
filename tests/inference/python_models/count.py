"""A decoupled model: as many responses as its input says, 0, 1, 2 and so on; below zero, one and then an error."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.outputs = [each["name"] for each in json.loads(args["model_config"])["output"]]

    def execute(self, requests):
        for request in requests:
            sender, wanted = request.get_response_sender(), int(request.inputs()[0].as_numpy().flat[0])
            for number in range(abs(wanted)):
                if wanted < 0 and number:
                    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("half way")))
                values = [np.array([[number + 10 * index]], np.int32) for index in range(len(self.outputs))]
                tensors = [pb_utils.Tensor(*each) for each in zip(self.outputs, values, strict=True)]
                if wanted > 0 or not number:
                    sender.send(pb_utils.InferenceResponse(tensors))
            if wanted >= 0:
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
