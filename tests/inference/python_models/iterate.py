"""Counts down from the input, one execution for each number; a decoupled one sends each number as a response."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))
        self.left = {}
        self.most = 0

    def execute(self, requests):
        self.most = max(self.most, len(requests))
        responses = [self.respond(request) for request in requests]
        return None if self.decoupled else responses

    def respond(self, request):
        sequence = request.correlation_id()
        if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            self.left[sequence] = int(pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy().item())
        left = self.left[sequence] = self.left[sequence] - 1
        if self.decoupled:
            request.get_response_sender().send(self.response(left))
        if left > 0:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return None
        del self.left[sequence]
        if self.decoupled:
            request.get_response_sender().send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return self.response(self.most)

    def response(self, number):
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.array([[number]], np.int32))])
